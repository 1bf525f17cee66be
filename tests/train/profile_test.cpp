// What is computed from recorded spans: clock offsets, the summary and its table, and the trace's
// text.
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/call_trace.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/model.h>

#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "profile/clocks.h"
#include "profile/intervals.h"
#include "profile/profiler.h"
#include "profile/summary.h"
#include "profile/trace_text.h"
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

TEST(ClocksTest, TheOffsetIsWithinItsErrorOfTheTruth) {
  std::mt19937_64 random(0);
  const auto below = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  constexpr int64_t kNow = 1'800'000'000'000'000'000;  // as a double it is off by up to 128 ns
  for (int i = 0; i < 1000; ++i) {
    const int64_t truth = below(kNow) - kNow / 2;
    std::vector<ClockReading> readings;
    int64_t shortest = std::numeric_limits<int64_t>::max();
    int64_t now = kNow;
    for (int64_t k = 0; k <= below(20); ++k) {
      // The ways there and back may take different times.
      const int64_t there = below(1000) + 1;
      const int64_t back = below(100'000) + 1;
      readings.push_back({now, now + there + truth, now + there + back});
      shortest = std::min(shortest, there + back);
      now += there + back;
    }
    const auto [offset, error] = offset_of(readings);
    ASSERT_LE(std::abs(offset - truth), error);
    ASSERT_LE(error, (shortest + 1) / 2);
  }
}

TEST(ClocksTest, RanksOfAHostHaveOneOffset) {
  test::run_ranks(4, [](int rank) {
    dist::init_process_group();
    constexpr int64_t kAhead = 5'000'000'000;
    const bool is_ahead = rank >= 2;
    const auto clocks = clock_offsets(is_ahead ? "b" : "a",
                                      [&] { return base::unix_ns() + (is_ahead ? kAhead : 0); });
    ASSERT_EQ(clocks.size(), 4);
    for (const size_t first : {0, 1}) {
      EXPECT_EQ(clocks[first].offset, 0);
      EXPECT_EQ(clocks[first].error, 0);
    }
    for (const size_t second : {2, 3}) {
      EXPECT_LE(std::abs(clocks[second].offset - kAhead), clocks[second].error);
      EXPECT_GT(clocks[second].error, 0);
      EXPECT_LT(clocks[second].error, 1'000'000'000);
    }
    EXPECT_EQ(clocks[2].offset, clocks[3].offset);
    dist::destroy_process_group();
  });
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
    EXPECT_EQ(call.bytes, 4000);
    EXPECT_LE(around.begin, call.begin);
    EXPECT_LE(call.begin, call.waited_from);
    EXPECT_LE(call.waited_from, call.end);
    EXPECT_LE(call.end, around.end);
    // The same call has the same number on all ranks.
    at::Tensor numbers = at::scalar_tensor(static_cast<int64_t>(call.sequence), at::kLong);
    for (const at::Tensor& number : dist::all_gather(numbers)) {
      EXPECT_EQ(number.item<int64_t>(), static_cast<int64_t>(call.sequence));
    }
    dist::destroy_process_group();
  });
}

/// The times of two ranks in one step. Rank 1 waits 2 ms longer for its batch, and its clock is one
/// second ahead.
constexpr int64_t kAhead = 1000 * kMs;

std::vector<RankProfile> two_ranks() {
  using Kind = Exchange::Kind;
  const auto at = [](int64_t begin, int64_t end, int64_t ahead) {
    return Interval{begin * kMs / 10 + ahead, end * kMs / 10 + ahead};
  };
  std::vector<RankProfile> ranks;
  for (const int64_t rank : {0, 1}) {
    const int64_t ahead = rank * kAhead;
    const int64_t late = rank * 20;  // tenths of a millisecond
    const auto time = [&](int64_t begin, int64_t end) { return at(begin, end, ahead); };
    RankProfile one{.rank = rank, .host = rank == 0 ? "red" : "blue", .first_step = 11};
    one.steps = {time(0, 100)};
    one.phases = {{"loader", time(0, 10 + late)},
                  {"forward", time(10 + late, 45)},
                  {"backward", time(45, 90)},
                  {"vote", time(90, 100)}};
    const Interval statistics = time(20 + late, 45);
    const Interval gradients = time(50 + late / 2, 90);
    one.exchanges = {
        {"bn", Kind::kStatistics, "g", 1, statistics, {statistics}},
        {"DDP bucket 0", Kind::kGradients, "default", 7, gradients, {time(80 + late / 4, 90)}}};
    one.layers = {{"bn", 1, 1 * kMs / 2, 1 * kMs / 2, statistics.end - statistics.begin},
                  {"conv", 1, 1 * kMs, (2 + rank) * kMs, 0}};
    // Serialised and read back, as rank 0 receives it.
    ranks.push_back(rank_profile_of(to_bytes(one)));
  }
  return ranks;
}

TEST(ProfileSummaryTest, HasTheNumbersOfASmallTrace) {
  const auto summary = summary_of(two_ranks(), {{0, 0}, {kAhead, 10'000}});
  EXPECT_DOUBLE_EQ(summary["step_seconds"], 0.010);
  ASSERT_EQ(summary["layers"].size(), 2);
  EXPECT_EQ(summary["layers"][0]["name"], "conv");
  EXPECT_DOUBLE_EQ(summary["layers"][0]["forward"], 0.001);
  EXPECT_DOUBLE_EQ(summary["layers"][0]["backward"], 0.0025);
  EXPECT_DOUBLE_EQ(summary["layers"][0]["share"], 7.0 / 9);
  EXPECT_DOUBLE_EQ(summary["layers"][1]["exchange"], 0.0015);
  // Rank 0: 4 ms, of which it waits 1 ms; rank 1: 3 ms, of which it waits 0.5 ms.
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
                          "it hidden behind computation",
                          "rank 0 waits 2 ms a step for rank 1, mostly in bn",
                          "straggler: rank 1 on blue, for which each other rank waits 2 ms a step; "
                          "its loader takes 2 ms longer",
                          "clocks of hosts are aligned to within 10 us"));
}

TEST(ProfileSummaryTest, AWaitWithinTheClocksErrorIsNone) {
  const auto summary = summary_of(two_ranks(), {{0, 0}, {kAhead, 2 * kMs}});
  EXPECT_THAT(summary["waits"], IsEmpty());
  EXPECT_TRUE(summary["straggler"].is_null());
}

TEST(ProfileSummaryTest, RanksThatTakeTurnsAreNoStragglers) {
  auto ranks = two_ranks();
  for (const size_t rank : {0, 1}) {
    // In another collective, rank 0 arrives 1.5 ms later.
    const int64_t ahead = rank == 1 ? kAhead : 0;
    const Interval time{90 * kMs / 10 + ahead + (rank == 0 ? 3 * kMs / 2 : 0), 12 * kMs + ahead};
    ranks[rank].exchanges.push_back({"vote", Exchange::Kind::kOther, "default", 8, time, {time}});
  }
  const auto summary = summary_of(ranks, {{0, 0}, {kAhead, 0}});
  EXPECT_EQ(summary["waits"].size(), 2);
  EXPECT_TRUE(summary["straggler"].is_null());
  EXPECT_THAT(table_of(summary), ::testing::Contains("straggler: none"));
}

TEST(ProfileSummaryTest, ASingleRankHasNoStraggler) {
  auto ranks = two_ranks();
  ranks.pop_back();
  ranks[0].exchanges.clear();
  const auto lines = base::join(table_of(summary_of(ranks, {{0, 0}})), "\n");
  EXPECT_THAT(lines, HasSubstr("mean of 1 rank\n"));
  EXPECT_THAT(lines, Not(HasSubstr("straggler")));
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

TEST(TraceTextTest, IsJsonWithExactTimes) {
  constexpr int64_t kStart = 1'800'000'000'000'000'000;
  const std::vector<Track> tracks{
      {"layers", {{"a \"quoted\"\n\xff name", {kStart + 1, kStart + 1'234'568}}}},
      {"training", {{"early", {kStart - 1'500, kStart}}}}};
  const auto events = nlohmann::json::parse("[" + trace_text(3, "red", tracks, kStart) + "]");
  ASSERT_EQ(events.size(), 8);
  EXPECT_EQ(events[0]["args"]["name"], "rank 3 (red)");
  const auto& layer = events[4];
  EXPECT_EQ(layer["pid"], 3);
  EXPECT_DOUBLE_EQ(layer["ts"], 0.001);
  EXPECT_DOUBLE_EQ(layer["dur"], 1234.567);
  EXPECT_THAT(layer["name"].get<std::string>(), HasSubstr("a \"quoted\"\n"));
  EXPECT_DOUBLE_EQ(events[7]["ts"], -1.5);
}

}  // namespace
}  // namespace syncbn::train
