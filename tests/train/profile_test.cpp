// What is computed from recorded times: the summary and its table.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/call_trace.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/model.h>

#include <nlohmann/json.hpp>

#include "profile/intervals.h"
#include "profile/profiler.h"
#include "profile/summary.h"
#include "support/multiproc.h"

namespace syncbn::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kMs = 1'000'000;

TEST(IntervalsTest, AreSetsOfTimes) {
  const Intervals a = united({{20, 30}, {0, 5}, {3, 10}, {10, 12}, {40, 40}});
  EXPECT_THAT(a, ElementsAre(Interval{0, 12}, Interval{20, 30}));
  const Intervals b{{5, 21}, {25, 26}};
  EXPECT_THAT(common(a, b), ElementsAre(Interval{5, 12}, Interval{20, 21}, Interval{25, 26}));
  EXPECT_THAT(without(a, b), ElementsAre(Interval{0, 5}, Interval{21, 25}, Interval{26, 30}));
  EXPECT_THAT(without(a, {}), ElementsAre(Interval{0, 12}, Interval{20, 30}));
  EXPECT_THAT(common(a, {}), IsEmpty());
  EXPECT_EQ(length_of(a), 22);
}

TEST(ExchangeTimeTest, AWaitForAnotherExchangeHidesNothing) {
  const Intervals gradients{{0, 6}, {4, 10}};
  // [4, 7): for an exchange of statistics. [9, 12): for the gradients.
  const ExchangeTime time = exchange_time(gradients, {{9, 12}, {4, 7}});
  EXPECT_EQ(time.total, 10);
  EXPECT_EQ(time.exposed, 4);
  EXPECT_EQ(exchange_time(gradients, {}).exposed, 0);
}

TEST(CallTraceTest, HasTheCallsThatEndWhileItLives) {
  test::run_ranks(2, [](int /*rank*/) {
    dist::init_process_group();
    at::Tensor tensor = at::ones({1000});
    const auto reduce = [&] {
      const int64_t before = base::unix_ns();
      dist::all_reduce(tensor);
      return Interval{before, base::unix_ns()};
    };
    reduce();
    std::vector<dist::TracedCall> calls;
    Interval around;
    {
      dist::CallTrace trace;
      around = reduce();
      calls = trace.take();
      ASSERT_EQ(calls.size(), 1);
      dist::all_reduce_async(tensor)->wait();
      ASSERT_EQ(trace.take().size(), 1);
      EXPECT_THAT(trace.take(), IsEmpty());
    }
    reduce();
    EXPECT_THAT(dist::CallTrace().take(), IsEmpty());
    const dist::TracedCall& call = calls[0];
    EXPECT_EQ(call.name, "all_reduce");
    EXPECT_EQ(call.peer, -1);
    EXPECT_LE(around.begin, call.begin);
    EXPECT_LE(call.begin, call.waited_from);
    EXPECT_LE(call.waited_from, call.end);
    EXPECT_LE(call.end, around.end);
    dist::destroy_process_group();
  });
}

/// Two ranks in one step of 10 ms.
std::vector<RankProfile> two_ranks() {
  std::vector<RankProfile> ranks;
  for (const int64_t rank : {0, 1}) {
    const RankProfile one{
        .first_step = 11,
        .steps = 1,
        .step_time = 10 * kMs,
        .layers = {{"bn", kMs / 2, kMs / 2, (2 - rank) * kMs}, {"conv", kMs, (2 + rank) * kMs, 0}},
        .gradients = {(4 - rank) * kMs, (2 - rank) * kMs / 2},
        .statistics = {(2 - rank) * kMs, (2 - rank) * kMs}};
    // Serialised and read back, as rank 0 receives it.
    ranks.push_back(rank_profile_of(to_bytes(one)));
  }
  return ranks;
}

TEST(ProfileSummaryTest, HasTheNumbersOfTwoRanks) {
  const auto summary = summary_of(two_ranks());
  EXPECT_DOUBLE_EQ(summary["step_seconds"], 0.010);
  ASSERT_EQ(summary["layers"].size(), 2);
  EXPECT_EQ(summary["layers"][0]["name"], "conv");
  EXPECT_DOUBLE_EQ(summary["layers"][0]["forward"], 0.001);
  EXPECT_DOUBLE_EQ(summary["layers"][0]["backward"], 0.0025);
  EXPECT_DOUBLE_EQ(summary["layers"][0]["share"], 7.0 / 9);
  EXPECT_DOUBLE_EQ(summary["layers"][1]["exchange"], 0.0015);
  EXPECT_DOUBLE_EQ(summary["gradients"]["seconds"], 0.0035);
  EXPECT_DOUBLE_EQ(summary["gradients"]["hidden_share"], 1 - 1.5 / 7);
  EXPECT_DOUBLE_EQ(summary["statistics"]["hidden_share"], 0);
  EXPECT_THAT(table_of(summary),
              ElementsAre("profile of step 11: 10 ms a step, mean of 2 ranks",
                          "  layer    forward   backward   exchange   share",
                          "  conv        1 ms     2.5 ms             77.8 %",
                          "  bn        500 us     500 us     1.5 ms  22.2 %",
                          "exchange of gradients: 3.5 ms a step (35.0 %), 78.6 % of it hidden "
                          "behind computation",
                          "exchange of batch norm's statistics: 1.5 ms a step (15.0 %), 0.0 % of "
                          "it hidden behind computation"));
}

TEST(ProfileSummaryTest, ASingleRankHasNoExchange) {
  auto ranks = two_ranks();
  ranks.pop_back();
  const auto lines = base::join(table_of(summary_of(ranks)), "\n");
  EXPECT_THAT(lines, HasSubstr("mean of 1 rank\n"));
  EXPECT_THAT(lines, Not(HasSubstr("exchange of")));
}

class Identity : public models::Model {
  at::Tensor forward(at::Tensor input) override { return input; }
};

TEST(ProfilerTest, ARequestedProfileBeginsAfterAWholeStepOfWarmUp) {
  test::run_ranks(1, [](int /*rank*/) {
    dist::init_process_group();
    const Identity net;
    Profiler profiler({}, net);
    std::vector<bool> ends;
    for (int64_t step = 1; step <= 4; ++step) {
      profiler.begin_step(step);
      if (step == 1) profiler.request(2);
      ends.push_back(profiler.end_step());
    }
    EXPECT_THAT(ends, ElementsAre(false, false, false, true)) << "step 2 is the warm-up";
    profiler.pause();
    dist::destroy_process_group();
  });
}

}  // namespace
}  // namespace syncbn::train
