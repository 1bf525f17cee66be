// Under a real SLURM: one that these tests start on this machine, with two nodes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <pwd.h>
#include <syncbn/base/atomic_file.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "launch/launcher.h"
#include "launch/leftovers.h"
#include "support/eventually.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

// Debian keeps the daemons where only root's PATH leads.
const std::string kController = "/usr/sbin/slurmctld";
const std::string kDaemon = "/usr/sbin/slurmd";

// Nodes are named by addresses, since a name that leads somewhere needs /etc/hosts.
constexpr const char* kNodes = "127.0.0.[2-3]";

/// A controller and a daemon for each node, with nothing but a folder of their own.
class SlurmTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SYNCBN_SKIP_UNLESS(fs::exists(kController) && fs::exists(kDaemon), "slurm");
    configuration_ = folder_.write("slurm.conf", configuration());
    start({kController, "-D", "-f", configuration_});
    for (const char* node : {"127.0.0.2", "127.0.0.3"}) {
      start({kDaemon, "-D", "-N", node, "-f", configuration_});
    }
    ASSERT_TRUE(eventually([this] {
      return count(run({"sinfo", "--noheader", "--Node", "--format=%t"}).out, "idle\n") == 2;
    })) << base::read_file(folder_ / "slurmctld.log");
  }

  void TearDown() override {
    if (daemons_.empty()) return;
    cancel_all();
    EXPECT_TRUE(eventually([this] { return run({"squeue", "--noheader"}).out.empty(); }));
  }

  RunProgramOptions options() const {
    return {.env = {{"SLURM_CONF", configuration_},
                    {"OMP_NUM_THREADS", "1"},
                    {"SYNCBN_TEST_JOB", folder_.path()}},
            .cwd = folder_.path()};
  }

  ProgramResult run(const std::vector<std::string>& command) const {
    return run_program(command, options());
  }

  void cancel_all() const {
    EXPECT_EQ(run({"scancel", "--user", std::to_string(::getuid())}).exit_code, 0);
  }

  /// `srun` with one launcher on each of two nodes.
  static std::vector<std::string> srun(const std::vector<std::string>& words) {
    std::vector<std::string> command{"srun", "--nodes=2", "--ntasks-per-node=1"};
    const auto launcher = launch_command(words);
    command.insert(command.end(), launcher.begin(), launcher.end());
    return command;
  }

  std::string marker() const { return "SYNCBN_TEST_JOB=" + folder_.path().string(); }
  const TempFolder& folder() const { return folder_; }

 private:
  std::string configuration() const {
    const std::string at = folder_.path();
    return fmt::format(
        "ClusterName=syncbn\n"
        "SlurmctldHost=localhost(127.0.0.1)\n"
        "SlurmUser={user}\n"
        "SlurmdUser={user}\n"
        "SlurmctldPort={controller_port}\n"
        // MASTER_PORT follows from the job's number, and another test may run such a cluster on
        // this host at the same time.
        "FirstJobId={first_job}\n"
        "AuthType=auth/none\n"
        "CredType=cred/none\n"
        "MpiDefault=none\n"
        "ProctrackType=proctrack/pgid\n"
        "TaskPlugin=task/none\n"
        "SelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_Core\n"
        // Jobs of several components are left to the backfill scheduler.
        "SchedulerParameters=bf_interval=1\n"
        "SlurmdParameters=config_overrides\n"
        "KillWait=1\n"
        "StateSaveLocation={at}/state\n"
        "SlurmdSpoolDir={at}/spool-%n\n"
        "SlurmctldPidFile={at}/slurmctld.pid\n"
        "SlurmdPidFile={at}/slurmd-%n.pid\n"
        "SlurmctldLogFile={at}/slurmctld.log\n"
        "SlurmdLogFile={at}/slurmd-%n.log\n"
        "NodeName={nodes} NodeHostname=localhost Port={ports} CPUs=4\n"
        "PartitionName=main Nodes={nodes} Default=YES\n",
        fmt::arg("user", ::getpwuid(::getuid())->pw_name), fmt::arg("controller_port", free_port()),
        fmt::arg("first_job", free_port()), fmt::arg("at", at), fmt::arg("nodes", kNodes),
        fmt::arg("ports", fmt::format("[{},{}]", free_port(), free_port())));
  }

  void start(const std::vector<std::string>& command) {
    // Their environment has no mark of the job's.
    daemons_.push_back(
        std::make_unique<Program>(command, RunProgramOptions{.cwd = folder_.path()}));
  }

  TempFolder folder_;
  std::string configuration_;
  std::vector<std::unique_ptr<Program>> daemons_;
};

constexpr const char* kSayRanks =
    "echo $RANK of $WORLD_SIZE at $MASTER_ADDR on $SLURMD_NODENAME, node $GROUP_RANK";

TEST_F(SlurmTest, TheNodesOfAStepAreOneJob) {
  const auto result = run(srun({"--nproc_per_node=2", "sh", "-c", kSayRanks}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("[0] 0 of 4 at 127.0.0.2 on 127.0.0.2, node 0\n"),
                                HasSubstr("[1] 1 of 4 at 127.0.0.2 on 127.0.0.2, node 0\n"),
                                HasSubstr("[2] 2 of 4 at 127.0.0.2 on 127.0.0.3, node 1\n"),
                                HasSubstr("[3] 3 of 4 at 127.0.0.2 on 127.0.0.3, node 1\n")));
}

TEST_F(SlurmTest, TheFirstFailuresCodeIsThatOfTheStep) {
  const auto result = run(srun({"sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 1000"}));
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_THAT(result.err, HasSubstr("rank 1 failed: exit code 7"));
}

TEST_F(SlurmTest, TheComponentsOfAHeterogeneousStepAreOneJob) {
  auto command = srun({"sh", "-c", kSayRanks});
  command[1] = "--nodes=1";
  const auto component = launch_command({"--nproc_per_node=2", "sh", "-c", kSayRanks});
  command.insert(command.end(), {":", "--nodes=1", "--ntasks-per-node=1"});
  command.insert(command.end(), component.begin(), component.end());
  const auto result = run(command);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("[0] 0 of 3 at 127.0.0.2 on 127.0.0.2, node 0\n"),
                                HasSubstr("[1] 1 of 3 at 127.0.0.2 on 127.0.0.3, node 1\n"),
                                HasSubstr("[2] 2 of 3 at 127.0.0.2 on 127.0.0.3, node 1\n")));
}

TEST_F(SlurmTest, StepsOfOneJobThatRunTogetherDoNotMeet) {
  // Each waits for a worker of the other one.
  const std::string script = folder().write(
      "steps",
      fmt::format("#!/bin/sh\n"
                  "step() {{ srun --overlap --nodes=2 --ntasks-per-node=1 {} --prefix=off sh -c "
                  "\"touch up$1-\\$RANK; while [ ! -e up$2-\\$RANK ]; do sleep 0.01; done; "
                  "echo step $1 rank \\$RANK of \\$WORLD_SIZE\"; }}\n"
                  "step a b & first=$!\n"
                  "step b a & second=$!\n"
                  "wait $first && wait $second\n",
                  kLauncher),
      true);
  const auto result = run({"salloc", "--nodes=2", "--ntasks-per-node=1", script});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* line : {"step a rank 0 of 2\n", "step a rank 1 of 2\n", "step b rank 0 of 2\n",
                           "step b rank 1 of 2\n"}) {
    EXPECT_THAT(result.out, HasSubstr(line));
  }
}

TEST_F(SlurmTest, ABatchScriptIsOneNode) {
  const std::string script =
      folder().write("batch", fmt::format("#!/bin/sh\n{} --nproc_per_node=2 sh -c "
                                          "'echo $RANK of $WORLD_SIZE'; echo ended with $?\n",
                                          kLauncher));
  ASSERT_EQ(run({"sbatch", "--nodes=2", "--output=out", script}).exit_code, 0);
  const std::string out = folder() / "out";
  ASSERT_TRUE(eventually(
      [&] { return fs::exists(out) && count(base::read_file(out), "ended with") == 1; }));
  EXPECT_THAT(base::read_file(out),
              AllOf(HasSubstr("0 of 2\n"), HasSubstr("1 of 2\n"), HasSubstr("ended with 0\n")));
}

TEST_F(SlurmTest, SeveralLaunchersOnANodeAreRefused) {
  const auto result =
      run({"srun", "--nodes=2", "--ntasks-per-node=2", kLauncher, "echo", "started"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr("SLURM starts 4 launchers on 2 nodes"));
}

TEST_F(SlurmTest, ScancelEndsTheJob) {
  Program step(srun({"--nproc_per_node=2", "sleep", "1000"}), options());
  ASSERT_TRUE(step.wait_until([this] { return count_programs(marker(), "sleep") == 4; }));
  cancel_all();
  EXPECT_EQ(step.wait().exit_code, 143);
  EXPECT_TRUE(eventually([this] { return job_processes(marker()).empty(); }));
}

// After KillWait SLURM kills the launchers, and with them go what ignored SIGTERM and what is in a
// session of its own. srun's exit code is then its own affair.
TEST_F(SlurmTest, NothingOutlivesACancelledJobThatDoesNotWantToEnd) {
  Program step(
      srun({"--nproc_per_node=2", "sh", "-c", "trap '' TERM; setsid sleep 1000 & exec sleep 1000"}),
      options());
  ASSERT_TRUE(step.wait_until([this] { return count_programs(marker(), "sleep") == 8; }));
  cancel_all();
  step.wait();
  EXPECT_TRUE(eventually([this] { return job_processes(marker()).empty(); }));
}

}  // namespace
}  // namespace syncbn::test
