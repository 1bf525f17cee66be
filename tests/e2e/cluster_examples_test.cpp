// The scripts of examples/slurm and examples/mpi, under a real SLURM and a real Open MPI on this
// machine.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>

#include <filesystem>

#include "e2e/log_lines.h"
#include "launch/slurm_cluster.h"
#include "support/eventually.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

/// The values of a key in the lines of log.jsonl that have this event.
std::vector<std::string> values_in_log(const fs::path& run, const std::string& event,
                                       const std::string& key) {
  std::vector<std::string> values;
  for (const auto& record : log_of(run, event)) values.push_back(record.at(key).dump());
  return values;
}

class SlurmExamplesTest : public SlurmCluster {
 protected:
  void SetUp() override {
    SlurmCluster::SetUp();
    fs::create_directory_symlink(SYNCBN_SOURCE_DIR "/configs", folder() / "configs");
    fs::create_directory_symlink(SYNCBN_SOURCE_DIR "/data", folder() / "data");
  }

  /// Submits this script as a job and returns the job's id.
  std::string submit(const std::string& script, const std::string& epochs) const {
    auto environment = options();
    environment.env["PATH"] = fmt::format("{}:{}", SYNCBN_BIN_DIR, std::getenv("PATH"));
    const auto result = run_program(
        {"sbatch", "--parsable", "--cpus-per-task=1", "--output=out-%a",
         SYNCBN_SOURCE_DIR "/examples/slurm/" + script, "configs/digits.yaml", "epochs=" + epochs},
        environment);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out.substr(0, result.out.find_first_of(";\n"));
  }

  std::string state(const std::string& job) const {
    return run({"squeue", "--noheader", "--format=%T", "--jobs=" + job}).out;
  }

  bool wait_for_end() const {
    return eventually(
        [this] {
          return run({"squeue", "--noheader"}).out.empty();
        },
        std::chrono::seconds(100));
  }

  std::string output(const std::string& task = "4294967294") const {
    const fs::path file = folder() / ("out-" + task);
    return fs::exists(file) ? base::read_file(file) : "";
  }
};

TEST_F(SlurmExamplesTest, OneNode) {
  submit("one_node.sh", "1");
  ASSERT_TRUE(wait_for_end()) << output();
  EXPECT_THAT(values_in_log(folder() / "runs/digits", "end", "reason"),
              ElementsAre("\"finished\""));
}

TEST_F(SlurmExamplesTest, SeveralNodesAreOneRun) {
  submit("several_nodes.sh", "1");
  ASSERT_TRUE(wait_for_end()) << output();
  EXPECT_THAT(output(), HasSubstr("one run on 2 nodes, according to SLURM"));
  EXPECT_THAT(values_in_log(folder() / "runs/digits", "end", "reason"),
              ElementsAre("\"finished\""));
}

// First the signal that SLURM sends before the time limit, then a preemption.
TEST_F(SlurmExamplesTest, APreemptibleRunGoesBackToTheQueueAndGoesOn) {
  const std::string job = submit("preemptible.sh", "15");
  const auto epochs = [this] { return count(output(), "train loss"); };
  ASSERT_TRUE(eventually([&] { return epochs() > 0; })) << output();
  ASSERT_EQ(run({"scancel", "--signal=USR1", job}).exit_code, 0);
  ASSERT_TRUE(eventually([&] { return state(job) == "PENDING\n"; })) << output();
  EXPECT_THAT(output(), HasSubstr("stopped by SIGUSR1"));

  // SLURM delays a requeued job by two minutes.
  const auto start_now = [&] {
    return run({"scontrol", "update", "JobId=" + job, "StartTime=now"}).exit_code == 0;
  };
  int before = epochs();
  ASSERT_TRUE(start_now());
  ASSERT_TRUE(eventually([&] { return epochs() > before; })) << output();
  ASSERT_EQ(run({"scontrol", "requeue", job}).exit_code, 0);
  ASSERT_TRUE(eventually([&] { return state(job) == "PENDING\n"; })) << output();

  ASSERT_TRUE(start_now());
  ASSERT_TRUE(wait_for_end()) << output();
  const fs::path folder_of_run = folder() / ("runs/train-" + job);
  EXPECT_THAT(values_in_log(folder_of_run, "start", "resumed"),
              ElementsAre("false", "true", "true"));
  EXPECT_EQ(values_in_log(folder_of_run, "end", "reason").back(), "\"finished\"");
}

TEST_F(SlurmExamplesTest, ASweepHasARunForEachTask) {
  const std::string job = submit("sweep.sh", "1");
  ASSERT_TRUE(wait_for_end());
  for (int task = 0; task < 4; ++task)
    EXPECT_THAT(output(std::to_string(task)), HasSubstr("epoch 1/1"));
  for (const char* rate : {"0.05", "0.1", "0.2", "0.4"}) {
    const fs::path run = folder() / fmt::format("runs/train-{}/optimizer.lr={}", job, rate);
    EXPECT_THAT(values_in_log(run, "end", "reason"), ElementsAre("\"finished\"")) << run;
  }
}

TEST(MpiExamplesTest, TheHostsOfARunOfMpirunAreOneRun) {
  SYNCBN_SKIP_UNLESS(fs::exists("/usr/bin/mpirun"), "mpi");
  const TempFolder folder;
  // Stands in for ssh; called as: HOST COMMAND…
  const std::string remote_shell =
      folder.write("shell",
                   "#!/bin/sh\n"
                   // Two daemons fail if they create the same session folder at once.
                   "export OMPI_MCA_orte_tmpdir_base=" +
                       folder.path().string() +
                       "/$1\n"
                       "mkdir -p $OMPI_MCA_orte_tmpdir_base\n"
                       "shift\nexec sh -c \"$*\"\n",
                   true);
  const auto result = run_program(
      {SYNCBN_SOURCE_DIR "/examples/mpi/several_hosts.sh", "127.0.0.2,127.0.0.3",
       SYNCBN_SOURCE_DIR "/configs/digits.yaml", "epochs=1",
       "run_dir=" + (folder / "run").string()},
      {.env = {{"PATH", fmt::format("{}:{}", SYNCBN_BIN_DIR, std::getenv("PATH"))},
               {"OMP_NUM_THREADS", "1"},
               {"PET_MASTER_PORT", std::to_string(free_port())},
               {"OMPI_MCA_plm_rsh_agent", remote_shell},
               // Both daemons are on one host, where they would share one map of its cores.
               {"OMPI_MCA_rtc", "^hwloc"},
               {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
               {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}},
       .cwd = SYNCBN_SOURCE_DIR});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("one run on 2 nodes, according to Open MPI"));
  EXPECT_THAT(values_in_log(folder / "run", "end", "reason"), ElementsAre("\"finished\""));
}

}  // namespace
}  // namespace syncbn::test
