#include <syncbn/base/progress_bar.h>

#include <gtest/gtest.h>

#include <cstdio>

namespace syncbn::base {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(ProgressBarTest, ShowsBarCountsTextAndTimes) {
  EXPECT_EQ(render_progress({.done = 50,
                             .total = 100,
                             .text = "epoch 3",
                             .elapsed = seconds(12),
                             .remaining = seconds(3700)},
                            80),
            "[##########..........] 50/100  50 %  epoch 3  0:12 < 1:01:40");
}

TEST(ProgressBarTest, ShowsACountWithoutATotal) {
  EXPECT_EQ(render_progress({.done = 5, .text = "reading", .elapsed = seconds(1)}, 80),
            "5  reading  0:01");
}

TEST(ProgressBarTest, NeverFillsTheTerminalsWidth) {
  const ProgressState state{.done = 1, .total = 2, .text = std::string(200, 'x')};
  EXPECT_EQ(render_progress(state, 40).size(), 39U);
  EXPECT_EQ(render_progress(state, 1), "");
}

TEST(ProgressBarTest, CutsBetweenCharacters) {
  const std::string line = render_progress({.done = 1, .text = "äöüäöü"}, 6);
  EXPECT_EQ(line, "1  äö");
}

TEST(ProgressBarTest, IsFullAndNoMoreWhenDoneExceedsTotal) {
  EXPECT_EQ(render_progress({.done = 30, .total = 20}, 80).substr(0, 35),
            "[####################] 30/20 100 % ");
}

syncbn_agent_record progress(uint64_t done, uint64_t total) {
  syncbn_agent_record record{};
  record.kind = SYNCBN_AGENT_PROGRESS;
  record.done = done;
  record.total = total;
  return record;
}

TEST(ProgressBarTest, IsDrawnAtMostOncePerPeriod) {
  ProgressBar bar;
  ProgressBar::Clock::time_point now{seconds(1000)};
  EXPECT_FALSE(bar.due());
  bar.update(progress(1, 10), now);
  EXPECT_LE(bar.due().value(), now);
  bar.draw(80, now);
  EXPECT_FALSE(bar.due());
  bar.update(progress(2, 10), now + milliseconds(1));
  EXPECT_EQ(bar.due().value(), now + ProgressBar::kPeriod);
}

TEST(ProgressBarTest, EstimatesTheRestFromTheSpeedSinceItsStart) {
  ProgressBar bar;
  const ProgressBar::Clock::time_point now{seconds(1000)};
  bar.update(progress(100, 200), now);  // resumed: the first 100 took no time
  bar.update(progress(110, 200), now + seconds(10));
  EXPECT_NE(bar.draw(80, now + seconds(10)).find("0:10 < 1:30"), std::string::npos);
}

TEST(ProgressBarTest, IsGoneAfterClear) {
  ProgressBar bar;
  const ProgressBar::Clock::time_point now{seconds(1000)};
  bar.update(progress(1, 2), now);
  EXPECT_NE(bar.draw(80, now), "");
  syncbn_agent_record clear{};
  clear.kind = SYNCBN_AGENT_CLEAR;
  bar.update(clear, now);
  ASSERT_TRUE(bar.due());
  EXPECT_EQ(bar.draw(80, now), "");
}

// `train` removes the bar for each line that it logs.
TEST(ProgressBarTest, KeepsItsTimeAcrossClear) {
  ProgressBar bar;
  const ProgressBar::Clock::time_point now{seconds(1000)};
  syncbn_agent_record clear{};
  clear.kind = SYNCBN_AGENT_CLEAR;
  bar.update(progress(10, 40), now);
  bar.update(progress(20, 40), now + seconds(10));
  bar.update(clear, now + seconds(10));
  bar.update(progress(30, 40), now + seconds(20));
  EXPECT_NE(bar.draw(80, now + seconds(20)).find("0:20 < 0:10"), std::string::npos);
  bar.update(clear, now + seconds(20));
  bar.update(progress(1, 40), now + seconds(30));
  EXPECT_NE(bar.draw(80, now + seconds(30)).find("0:00"), std::string::npos) << "a new bar";
}

}  // namespace
}  // namespace syncbn::base
