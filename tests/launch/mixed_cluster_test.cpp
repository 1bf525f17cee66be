// Jobs in which torchrun runs some of the nodes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <memory>

#include "launch/launcher.h"
#include "support/connection.h"
#include "support/multiproc.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// torchrun and our launchers in one job, with the same options.
class MixedClusterTest : public ::testing::Test {
 protected:
  void SetUp() override { SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch"); }

  std::unique_ptr<Program> start(bool torchrun, int nodes, int rank, int nproc,
                                 const std::vector<std::string>& program) {
    const Words launcher =
        torchrun ? Words{python(), "-m", "torch.distributed.run"} : launch_command({});
    const Words options{
        fmt::format("--nnodes={}", nodes),         fmt::format("--node_rank={}", rank),
        fmt::format("--nproc_per_node={}", nproc), "--master_addr=127.0.0.1",
        fmt::format("--master_port={}", port_),    "--no_python"};
    return std::make_unique<Program>(
        launcher + options + program,
        RunProgramOptions{.env = {{"OMP_NUM_THREADS", "1"}}, .cwd = folder_.path()});
  }

  /// Each worker prints its rank and the sum of all ranks.
  std::vector<std::string> sum_of_ranks() {
    folder_.write("sum.py", kSumOfRanks);
    return {python(), "sum.py"};
  }

  /// Leaves a mark, and runs until the file "end" exists.
  static std::vector<std::string> wait_for_end() {
    return {"sh", "-c", "touch up$RANK; while [ -e up$RANK ] && [ ! -e end ]; do sleep 0.01; done"};
  }

  TempFolder folder_;
  const int port_ = free_port();
};
using MixedClusterStartTest = MixedClusterTest;

TEST_F(MixedClusterStartTest, OurNodesAndTorchrunsFormOneJobWhoeverLeads) {
  const auto work = sum_of_ranks();
  for (const bool torchrun_leads : {false, true}) {
    const auto leads = start(torchrun_leads, 2, 0, 1, work);
    const auto joins = start(!torchrun_leads, 2, 1, 2, work);
    const auto first = leads->wait();
    const auto second = joins->wait();
    EXPECT_EQ(first.exit_code, 0) << first.err;
    EXPECT_EQ(second.exit_code, 0) << second.err;
    EXPECT_THAT(first.out, HasSubstr("rank 0 of 3 sum 3\n"));
    EXPECT_THAT(second.out,
                AllOf(HasSubstr("rank 1 of 3 sum 3\n"), HasSubstr("rank 2 of 3 sum 3\n")));
    EXPECT_EQ(second.err.find("torchrun runs node 0") != std::string::npos, torchrun_leads);
  }
}

TEST_F(MixedClusterTest, ATorchrunThatLeavesEarlyIsNoSuccess) {
  const auto ours = start(false, 2, 0, 1, {"true"});
  const auto torchruns = start(true, 2, 1, 1, {"sh", "-c", "exit 3"});
  EXPECT_EQ(ours->wait().exit_code, 75);
  EXPECT_NE(torchruns->wait().exit_code, 0);
}

TEST_F(MixedClusterTest, OurFailureEndsUs) {
  for (const bool leads : {true, false}) {
    std::filesystem::remove(folder_ / "end");
    const auto torchruns = start(true, 2, leads ? 1 : 0, 1, wait_for_end());
    const auto ours = start(false, 2, leads ? 0 : 1, 1, {"sh", "-c", "exit 7"});
    const auto result = ours->wait();
    EXPECT_EQ(result.exit_code, 7);
    EXPECT_THAT(result.err, HasSubstr("exit code 7"));
    folder_.write("end", "");  // whatever torchrun does then
  }
}

TEST_F(MixedClusterTest, ATorchrunOfNode0ThatDiesEndsOurWorkers) {
  const auto torchruns = start(true, 2, 0, 1, wait_for_end());
  const auto ours = start(false, 2, 1, 1, wait_for_end());
  ASSERT_TRUE(ours->wait_until([&] { return std::filesystem::exists(folder_ / "up1"); }));
  torchruns->send_signal(SIGKILL);
  const auto result = ours->wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("torchrun's node 0 is gone"));
  folder_.write("end", "");  // ends torchrun's worker, which torchrun leaves running
}

// Its agent answers neither `status` nor that a worker makes no progress.
TEST_F(MixedClusterTest, BesideNode0OfTorchrunOurNodeAnswersForItsOwnWorkers) {
  const auto torchruns = start(true, 2, 0, 1, wait_for_end());
  const auto ours =
      start(false, 2, 1, 1, {"--hang_timeout=10", kAgentWorker, "heartbeat", "31", "wait"});
  std::string status;
  EXPECT_TRUE(ours->wait_until([&] {
    status = run_program({kLauncher, "status", std::to_string(ours->pid())}).out;
    return status.find("sleeping") != std::string::npos;
  }));
  EXPECT_THAT(status, ::testing::ContainsRegex("    1 .* sleeping +31 "));
  const auto result = ours->wait();
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(result.err, HasSubstr("rank 1 failed: it made no progress (--hang_timeout)"));
  folder_.write("end", "");
}

TEST_F(MixedClusterTest, ASignalInTheBarrierEndsUs) {
  const auto ours = start(false, 2, 0, 1, {"true"});
  const auto torchruns = start(true, 2, 1, 1, wait_for_end());
  ASSERT_TRUE(ours->wait_until([&] { return std::filesystem::exists(folder_ / "up1"); }));
  ASSERT_TRUE(ours->wait_until([&] { return children_of(ours->pid()).empty(); }));
  ours->end_by(SIGTERM);
  folder_.write("end", "");
  torchruns->wait();
}

// Such as a port scanner or a load balancer's probe.
TEST_F(MixedClusterTest, ASilentConnectionDoesNotKeepTheJob) {
  const auto ours = start(false, 2, 0, 1, {"true"});
  const auto silent = connect_to(port_);
  ASSERT_TRUE(silent);
  const auto torchruns = start(true, 2, 1, 1, {"true"});
  const auto result = ours->wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(torchruns->wait().exit_code, 0);
}

}  // namespace
}  // namespace syncbn::test
