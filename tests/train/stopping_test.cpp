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

    auto result = vote.cast(0, fine, 1);
    EXPECT_EQ(result.stop_signal, 0);
    EXPECT_TRUE(result.is_finite());

    result = vote.cast(rank == 1 ? SIGTERM : 0, fine, 1);
    EXPECT_EQ(result.stop_signal, SIGTERM);
    EXPECT_TRUE(result.is_finite());

    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    result = vote.cast(0, rank == 2 ? bad(kNan) : fine, 1);
    EXPECT_FALSE(result.is_finite());
    EXPECT_EQ(result.worst_rank, 2);
    result = vote.cast(0, rank > 0 ? bad(rank == 1 ? kInfinity : -kInfinity) : fine, 1);
    EXPECT_FALSE(result.is_finite());
    EXPECT_EQ(result.worst_rank, 1);

    // The ballot is empty again.
    result = vote.cast(0, fine, 1);
    EXPECT_EQ(result.stop_signal, 0);
    EXPECT_TRUE(result.is_finite());
    dist::destroy_process_group();
  });
}

TEST(StepVoteTest, TheLossIsTheMeanOverAllRanksSamples) {
  test::run_ranks(3, [](int rank) {
    dist::init_process_group();
    // 2 samples of loss 1, 3 of loss 2, 4 of loss 3.
    const auto result = StepVote(at::kCPU).cast(0, at::scalar_tensor(rank + 1.0), rank + 2);
    EXPECT_EQ(result.samples, 9);
    EXPECT_DOUBLE_EQ(result.loss(), (2.0 + 3 * 2 + 4 * 3) / 9);
    dist::destroy_process_group();
  });
}

TEST(StopSignalsTest, AllThatAskARunToStopAreRemembered) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) {
    const StopSignals signals;
    EXPECT_EQ(StopSignals::received(), 0);
    ::raise(signal);
    EXPECT_EQ(StopSignals::received(), signal);
  }
}

TEST(StopSignalsTest, WhatIsIgnoredStaysSo) {
  ::signal(SIGHUP, SIG_IGN);
  const StopSignals signals;
  ::raise(SIGHUP);
  EXPECT_EQ(StopSignals::received(), 0);
  ::signal(SIGHUP, SIG_DFL);
}

}  // namespace
}  // namespace syncbn::train
