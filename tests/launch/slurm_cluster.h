#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <syncbn/base/atomic_file.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "launch/launcher.h"
#include "support/eventually.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/text.h"

namespace syncbn::test {

// Debian installs the daemons in a folder that only root has in PATH.
inline const std::string kSlurmController = "/usr/sbin/slurmctld";
inline const std::string kSlurmDaemon = "/usr/sbin/slurmd";

// Nodes have addresses for names, since other names would have to be in /etc/hosts.
inline constexpr const char* kSlurmNodes = "127.0.0.[2-3]";

/// A controller and a daemon for each node, which need nothing but a folder.
class SlurmCluster : public ::testing::Test {
 protected:
  void SetUp() override {
    SYNCBN_SKIP_UNLESS(
        std::filesystem::exists(kSlurmController) && std::filesystem::exists(kSlurmDaemon),
        "slurm");
    configuration_ = folder_.write("slurm.conf", configuration());
    start({kSlurmController, "-D", "-f", configuration_});
    for (const char* node : {"127.0.0.2", "127.0.0.3"}) {
      start({kSlurmDaemon, "-D", "-N", node, "-f", configuration_});
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
        // MASTER_PORT depends on the job's number, and another test may run such a cluster on this
        // host at the same time.
        "FirstJobId={first_job}\n"
        "AuthType=auth/none\n"
        "CredType=cred/none\n"
        "MpiDefault=none\n"
        "ProctrackType=proctrack/pgid\n"
        "TaskPlugin=task/none\n"
        "SelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_Core\n"
        // The backfill scheduler starts heterogeneous jobs: let it run every second.
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
        fmt::arg("first_job", free_port()), fmt::arg("at", at), fmt::arg("nodes", kSlurmNodes),
        fmt::arg("ports", fmt::format("[{},{}]", free_port(), free_port())));
  }

  void start(const std::vector<std::string>& command) {
    // The daemons' environment must not contain the job's marker.
    daemons_.push_back(
        std::make_unique<Program>(command, RunProgramOptions{.cwd = folder_.path()}));
  }

  TempFolder folder_;
  std::string configuration_;
  std::vector<std::unique_ptr<Program>> daemons_;
};

}  // namespace syncbn::test
