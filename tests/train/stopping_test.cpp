#include "step/stopping.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/dist/process_group.h>

#include <chrono>
#include <limits>
#include <thread>

#include "support/multiproc.h"

namespace syncbn::train {
namespace {

/// Casts a vote and takes its result immediately.
StepVote::Result vote_on(StepVote& vote, const Wishes& wishes, const at::Tensor& loss,
                         int64_t samples = 1, bool overflows = false) {
  at::Tensor found_inf = at::scalar_tensor(overflows ? 1.0F : 0.0F);
  vote.cast(wishes, loss, samples, found_inf);
  const auto result = vote.take();
  EXPECT_EQ(found_inf.item<float>() != 0, overflows || !result->is_finite());
  EXPECT_FALSE(vote.take()) << "a result is taken once";
  return *result;
}

TEST(StepVoteTest, AWishOrABadLossOfOneRankReachesAllRanks) {
  test::run_ranks(3, [](int rank) {
    dist::init_process_group();
    StepVote vote;
    EXPECT_FALSE(vote.take()) << "nobody has voted";
    const at::Tensor fine = at::scalar_tensor(1.0);
    const auto bad = [](double value) { return at::scalar_tensor(value); };

    auto result = vote_on(vote, {}, fine);
    EXPECT_EQ(result.wishes.stop_signal, 0);
    EXPECT_TRUE(result.is_finite());

    result = vote_on(vote, {.stop_signal = rank == 1 ? SIGTERM : 0}, fine);
    EXPECT_EQ(result.wishes.stop_signal, SIGTERM);
    EXPECT_TRUE(result.is_finite());

    result = vote_on(vote, {.wants_save = rank == 0}, fine);
    EXPECT_TRUE(result.wishes.wants_save);
    EXPECT_FALSE(result.wishes.wants_stop);
    result = vote_on(vote, {.wants_stop = rank == 2}, fine);
    EXPECT_TRUE(result.wishes.wants_stop);
    EXPECT_EQ(result.wishes.profile_steps, 0);
    result = vote_on(vote, {.profile_steps = rank == 0 ? 3 : 0}, fine);
    EXPECT_EQ(result.wishes.profile_steps, 3);

    result = vote_on(vote, {}, fine, 1, /*overflows=*/true);
    EXPECT_TRUE(result.overflowed);
    EXPECT_TRUE(result.is_finite());

    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    result = vote_on(vote, {}, rank == 2 ? bad(kNan) : fine);
    EXPECT_FALSE(result.is_finite());
    EXPECT_EQ(result.first_bad_rank, 2);
    result = vote_on(vote, {}, rank > 0 ? bad(rank == 1 ? kInfinity : -kInfinity) : fine);
    EXPECT_FALSE(result.is_finite());
    EXPECT_EQ(result.first_bad_rank, 1);

    // The next vote does not contain the previous wishes.
    result = vote_on(vote, {}, fine);
    EXPECT_EQ(result.wishes.stop_signal, 0);
    EXPECT_FALSE(result.overflowed);
    EXPECT_TRUE(result.is_finite());
    dist::destroy_process_group();
  });
}

TEST(StepVoteTest, TheLossIsTheMeanOverAllRanksSamples) {
  test::run_ranks(3, [](int rank) {
    dist::init_process_group();
    // 2 samples of loss 1, 3 of loss 2, 4 of loss 3.
    StepVote vote;
    const auto result = vote_on(vote, {}, at::scalar_tensor(rank + 1.0), rank + 2);
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

TEST(StopSignalsTest, ALaterSecondOneEndsTheProcessUnlessALauncherDoes) {
  const auto ends = [](bool launched, std::chrono::milliseconds pause) {
    const auto end = [&](int /*rank*/) {
      if (!launched) ::unsetenv("LOCAL_RANK");
      const StopSignals signals;
      ::raise(SIGUSR1);
      std::this_thread::sleep_for(pause);
      ::raise(SIGTERM);
    };
    return test::run_ranks_and_collect({.world_size = 1}, end).front().exit_code;
  };
  constexpr std::chrono::milliseconds kLater{1100};  // a signal within 1 s counts as a copy
  EXPECT_EQ(ends(false, std::chrono::milliseconds(0)), 0) << "a copy of the first";
  EXPECT_EQ(ends(false, kLater), 128 + SIGTERM);
  EXPECT_EQ(ends(true, kLater), 0);
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
