#include <syncbn/base/progress_bar.h>

#include <gtest/gtest.h>

#include <algorithm>

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
            "[#####.....]  50/100   50 %  epoch 3  0:12 < 1:01:40");
}

TEST(ProgressBarTest, LeavesOutWhatMattersLeastOnANarrowTerminal) {
  const ProgressState state{.done = 50,
                            .total = 100,
                            .text = "epoch 3/10  loss 0.2134  val accuracy 98.1 %  lr 0.05",
                            .elapsed = seconds(12),
                            .remaining = seconds(13)};
  const auto at = [&](int columns) { return render_progress(state, columns); };
  EXPECT_EQ(
      at(120),
      "[#######........]  50/100   50 %  epoch 3/10  loss 0.2134  val accuracy 98.1 %  lr 0.05  "
      "0:12 < 0:13");
  EXPECT_EQ(at(80),
            "[#####.....]   50 %  epoch 3/10  loss 0.2134  val accuracy 98.1 %  0:12 < 0:13");
  EXPECT_EQ(at(60), "[###....]   50 %  epoch 3/10  loss 0.2134  0:12 < 0:13");
  EXPECT_EQ(at(40), "[##...]   50 %  epoch 3/10  0:12 < 0:13");
  EXPECT_EQ(at(32), " 50 %  epoch 3/10  0:12 < 0:13");
  EXPECT_EQ(at(20), " 50 %  0:12 < 0:13");
  EXPECT_EQ(at(10), " 50 %  ep");
  for (int columns = 0; columns < 150; ++columns) {
    EXPECT_LE(static_cast<int>(at(columns).size()), std::max(columns - 1, 0)) << columns;
  }
}

TEST(ProgressBarTest, IsALineWhereThereIsNoTerminal) {
  EXPECT_EQ(progress_line({.done = 5,
                           .total = 100,
                           .text = "epoch 3  loss 0.21",
                           .elapsed = seconds(12),
                           .remaining = seconds(228)}),
            "step 5/100    5 %  epoch 3  loss 0.21  0:12 < 3:48");
  EXPECT_EQ(progress_line({.done = 5, .text = "reading"}), "step 5  reading  0:00");
}

TEST(ProgressBarTest, ShowsACountWithoutATotal) {
  EXPECT_EQ(render_progress({.done = 5, .text = "reading", .elapsed = seconds(1)}, 80),
            "5  reading  0:01");
}

TEST(ProgressBarTest, NeverFillsTheTerminalsWidth) {
  const ProgressState state{.done = 1, .total = 2, .text = std::string(200, 'x')};
  EXPECT_EQ(render_progress(state, 40), " 50 %  " + std::string(26, 'x') + "  0:00");
  EXPECT_EQ(render_progress(state, 1), "");
}

TEST(ProgressBarTest, CutsBetweenCharacters) {
  const std::string line = render_progress({.done = 1, .text = "äöüäöü"}, 6);
  EXPECT_EQ(line, "1  äö");
}

TEST(ProgressBarTest, IsFullAndNoMoreWhenDoneExceedsTotal) {
  EXPECT_EQ(render_progress({.done = 30, .total = 20}, 80), "[##########]  30/20  100 %  0:00");
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
  bar.update(progress(100, 200), now);  // resumed: the first 100 took no time in this run
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
