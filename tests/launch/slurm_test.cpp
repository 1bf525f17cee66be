// Under a real SLURM, which these tests start on this machine, with two nodes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>

#include <filesystem>

#include "launch/leftovers.h"
#include "launch/slurm_cluster.h"
#include "support/eventually.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

class SlurmTest : public SlurmCluster {};

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
  // Each step waits for a worker of the other step.
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

// After KillWait, SLURM kills the launchers; with them end workers that ignored SIGTERM and
// processes in other sessions. The exit code is then srun's own.
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
