#include "commands/run_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include <cmath>
#include <memory>

#include "records/run_folder.h"
#include "support/temp_folder.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

TEST(SparklineTest, GoesFromTheLowestValueToTheHighest) {
  EXPECT_EQ(sparkline({0, 1, 2, 3, 4, 5, 6, 7}, 20), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(sparkline({3, 3}, 20), "▄▄");
  EXPECT_EQ(sparkline({0, std::nan(""), 7}, 20), "▁ █");
  EXPECT_EQ(sparkline({std::nan("")}, 20), " ");
  EXPECT_EQ(sparkline({}, 20), "");
  EXPECT_EQ(sparkline({1, 2}, 0), "");
  EXPECT_EQ(sparkline({1, 2}, -3), "");
}

TEST(SparklineTest, ShowsMeansOfMoreValuesThanFit) {
  EXPECT_EQ(sparkline({0, 0, 7, 7, 0, std::nan("")}, 3), "▁█▁");
  const std::vector<double> many(100'000, 1.0);
  EXPECT_EQ(sparkline(many, 10), "▄▄▄▄▄▄▄▄▄▄");
}

class RunViewTest : public ::testing::Test {
 protected:
  void start(bool resume = false, int64_t step = 0) {
    run_ = std::make_unique<RunFolder>(path_, "epochs: 10\n", resume);
    if (resume) run_->rewind_log(step, 1, "");
    run_->log_start(2, step, resume, /*total_steps=*/100);
  }

  void epoch(int64_t number, double loss) {
    EpochRecord record{.epoch = number, .step = 10 * number, .lr = 0.1};
    record.train = {{"loss", loss}};
    record.eval_split = "val";
    record.eval = {{"accuracy", 1 - loss}};
    run_->append(line_of(record));
  }

  const test::TempFolder folder_;
  const fs::path path_ = folder_.path() / "digits";
  std::unique_ptr<RunFolder> run_;
};

TEST_F(RunViewTest, FollowsARunToItsEnd) {
  start();
  RunView view(path_);
  EXPECT_THAT(view.screen(80, 23, false),
              ElementsAre("digits  running  2 ranks", HasSubstr("  epoch 1/10  ")))
      << "no line about a step yet";
  run_->log_step(5, 1, 0.75, 0.1, 0);
  run_->write_lines();
  epoch(1, 0.5);
  epoch(2, 0.25);
  view.update();
  EXPECT_FALSE(view.is_over());
  const auto lines = view.screen(80, 23, false);
  EXPECT_THAT(lines[1], StartsWith("[##........]  20/100   20 %  epoch 2/10  loss 0.7500  0:0"));
  EXPECT_THAT(lines, ::testing::Contains("step loss               0.75 ▄"));
  EXPECT_THAT(lines, ::testing::Contains("train loss              0.25 █▁"));
  EXPECT_THAT(lines, ::testing::Contains("val accuracy         75.00 % ▁█"));
  EXPECT_THAT(view.news(),
              ElementsAre(StartsWith("epoch 1  step 10  learning rate 0.1  train loss 0.5"),
                          StartsWith("epoch 2  step 20  learning rate 0.1  train loss 0.25")));
  EXPECT_THAT(view.news(), ElementsAre());
  run_->log_end("finished", 20);
  run_.reset();
  view.update();
  EXPECT_TRUE(view.is_over());
  EXPECT_THAT(view.screen(80, 23, false)[0], "digits  finished  2 ranks");
  EXPECT_THAT(view.screen(80, 23, true)[0], HasSubstr("\x1b[32m"));
  EXPECT_THAT(view.news(), ElementsAre("finished"));
}

TEST_F(RunViewTest, ShowsSharesInPercent) {
  start();
  EpochRecord record{.epoch = 1, .step = 10};
  record.eval_split = "val";
  record.eval = {{"miou", 0.5}, {"accuracy_cat", 0.25}, {"distance", 0.125}};
  run_->append(line_of(record));
  const auto lines = RunView(path_).screen(80, 23, false);
  EXPECT_THAT(lines, ::testing::Contains("val miou             50.00 % ▄"));
  EXPECT_THAT(lines, ::testing::Contains("val accuracy cat     25.00 % ▄"));
  EXPECT_THAT(lines, ::testing::Contains("val distance           0.125 ▄"));
}

TEST_F(RunViewTest, NamesEachNumberOn40Columns) {
  start();
  EpochRecord record{.epoch = 1, .step = 10, .memory_bytes = 1e6};
  record.train = {{"mean_class_accuracy", 0.5}};
  record.eval_split = "test";
  record.eval = record.train;
  run_->append(line_of(record));
  const auto lines = RunView(path_).screen(40, 23, false);
  const auto has = [&](const char* text) { EXPECT_THAT(lines, ::testing::Contains(text)); };
  has("                        latest over the");
  has("learning rate                0 ▄");
  has("train mea…s accuracy   50.00 % ▄");
  has("test mean…s accuracy   50.00 % ▄");
  has("data wait per step        0 us ▄");
  has("memory                  1.0 MB ▄");
}

TEST_F(RunViewTest, SaysWhyARunHasEnded) {
  start();
  run_->log_end("the loss of rank 1 is not finite", 7);
  run_.reset();
  // 30 s after the log's last change, which lies far in the future, since this test may be slow.
  const auto changed_ahead = [&] {
    fs::last_write_time(path_ / "log.jsonl",
                        fs::file_time_type::clock::now() + std::chrono::seconds(1100));
  };
  const auto changed_long_ago = [&] {
    fs::last_write_time(path_ / "log.jsonl",
                        fs::file_time_type::clock::now() - std::chrono::minutes(5));
  };
  changed_ahead();
  RunView failed(path_);
  EXPECT_FALSE(failed.is_over()) << "the launcher may restart it";
  EXPECT_THAT(failed.screen(120, 9, false)[0],
              ContainsRegex("stopped: the loss of rank 1 is not finite; watch ends in "
                            "1[0-9][0-9][0-9] s unless it is restarted  2 ranks"));
  changed_long_ago();
  failed.update();
  EXPECT_TRUE(failed.is_over());
  EXPECT_EQ(failed.screen(80, 9, false)[0],
            "digits  stopped: the loss of rank 1 is not finite  2 ranks");
  start(/*resume=*/true, /*step=*/7);
  failed.update();
  EXPECT_EQ(failed.screen(80, 9, false)[0], "digits  running  2 ranks");
  run_.reset();
  RunView killed(path_);
  changed_ahead();
  killed.update();
  EXPECT_FALSE(killed.is_over()) << "the launcher may restart it";
  const std::string waits =
      "no process writes to it; watch ends in 1[0-9][0-9][0-9] s unless it is restarted";
  EXPECT_THAT(killed.screen(90, 9, false)[0], ContainsRegex(waits));
  EXPECT_THAT(killed.news(), ElementsAre(MatchesRegex(waits)));
  EXPECT_THAT(killed.news(), ElementsAre());
  changed_long_ago();
  killed.update();
  EXPECT_TRUE(killed.is_over());
  EXPECT_THAT(killed.news(),
              ElementsAre("stopped without a last line: killed, or its host failed"));
}

TEST_F(RunViewTest, BeginsAnewWithALogThatWasRewound) {
  start();
  epoch(1, 0.5);
  epoch(2, 0.25);
  RunView view(path_);
  EXPECT_THAT(view.news(), ::testing::SizeIs(2));
  run_.reset();
  start(/*resume=*/true, /*step=*/10);
  view.update();
  EXPECT_THAT(view.screen(80, 23, false)[1], HasSubstr("  epoch 2/10  "));
  epoch(2, 0.125);
  view.update();
  EXPECT_THAT(view.news(), ElementsAre(HasSubstr("train loss 0.125")));
  EXPECT_THAT(view.screen(80, 23, false), ::testing::Contains("train loss             0.125 █▁"));
}

TEST_F(RunViewTest, ShowsOnlyWholeLines) {
  start();
  run_.reset();
  const std::string log = base::read_file(path_ / "log.jsonl");
  base::write_file_atomically(path_ / "log.jsonl", log + R"({"event":"epoch","epoch":3,"train_l)");
  RunView view(path_);
  EXPECT_THAT(view.screen(80, 23, false), ::testing::SizeIs(2));
  base::write_file_atomically(path_ / "log.jsonl",
                              log + R"({"event":"epoch","epoch":3,"train_loss":0.5})" + "\n");
  view.update();
  EXPECT_THAT(view.screen(80, 23, false), ::testing::SizeIs(4)) << "with a line of headings";
}

TEST_F(RunViewTest, FitsAnyTerminal) {
  start();
  epoch(1, 0.5);
  epoch(2, 0.25);
  const RunView view(path_);
  for (int columns = 1; columns < 130; columns += 3) {
    for (int rows = 1; rows < 12; ++rows) {
      const auto lines = view.screen(columns, rows, false);
      EXPECT_LE(static_cast<int>(lines.size()), rows);
      for (const std::string& line : lines) {
        EXPECT_LE(std::ranges::count_if(line, [](char c) { return (c & 0xc0) != 0x80; }),
                  columns - 1)
            << line;
      }
    }
  }
  EXPECT_EQ(view.screen(80, 4, false).back(), "… and 6 more");
}

TEST_F(RunViewTest, RefusesWhatIsNoRun) {
  EXPECT_THAT([&] { RunView(folder_ / "none"); },
              ThrowsMessage<base::UserError>(
                  ::testing::EndsWith("watch: there is no folder " + (folder_ / "none").string())));
  fs::create_symlink("loop", folder_ / "loop");
  EXPECT_THAT([&] { RunView(folder_ / "loop"); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("there is no folder " + (folder_ / "loop").string() + ": Too many")));
  EXPECT_THAT([&] { RunView(folder_.path()); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("is not the folder of a run: it has no log.jsonl; name one")));
  folder_.write("log.jsonl", R"({"event":"start","time":1,"format_version":2})"
                             "\n");
  EXPECT_THAT([&] { RunView(folder_.path()); },
              ThrowsMessage<base::UserError>(HasSubstr(
                  "is the run of a newer version of train (its log has format 2, this version")));
}

}  // namespace
}  // namespace syncbn::train
