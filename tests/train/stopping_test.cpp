#include "stopping.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/dist/process_group.h>

#include <limits>

#include "support/multiproc.h"

namespace syncbn::train {
namespace {

TEST(StepVoteTest, ASignalOrABadLossOnOneRankReachesAllRanks) {
  test::run_ranks(3, [](int rank) {
    dist::init_process_group();
    StepVote vote(at::kCPU);
    const at::Tensor fine = at::scalar_tensor(1.0);
    const auto bad = [](double value) { return at::scalar_tensor(value); };

    auto result = vote.cast(0, fine);
    EXPECT_EQ(result.stop_signal, 0);
    EXPECT_FALSE(result.not_finite);

    result = vote.cast(rank == 1 ? SIGTERM : 0, fine);
    EXPECT_EQ(result.stop_signal, SIGTERM);
    EXPECT_FALSE(result.not_finite);

    result = vote.cast(0, rank == 2 ? bad(std::numeric_limits<double>::quiet_NaN()) : fine);
    EXPECT_TRUE(result.not_finite);
    result = vote.cast(0, rank == 0 ? bad(std::numeric_limits<double>::infinity()) : fine);
    EXPECT_TRUE(result.not_finite);

    // The ballot is empty again.
    result = vote.cast(0, fine);
    EXPECT_EQ(result.stop_signal, 0);
    EXPECT_FALSE(result.not_finite);
    dist::destroy_process_group();
  });
}

}  // namespace
}  // namespace syncbn::train
