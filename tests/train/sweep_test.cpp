#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>

#include "commands/sweep_plan.h"
#include "commands/sweep_table.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> folders(const SweepPlan& plan) {
  std::vector<std::string> names;
  names.reserve(plan.runs.size());
  for (const auto& run : plan.runs) names.push_back(run.folder);
  return names;
}

std::string refusal(const std::vector<std::string>& args) {
  return test::message_of<base::UserError>([&] { plan_sweep(args); });
}

TEST(SweepPlanTest, HasEveryCombinationAndTheFirstKeyChangesSlowest) {
  const SweepPlan plan =
      plan_sweep({"--config", "x.yaml", "optimizer.lr=0.05,0.1", "epochs=3", "--seed", "0..2"});
  EXPECT_THAT(plan.keys, ElementsAre("optimizer.lr", "seed"));
  EXPECT_THAT(plan.arguments, ElementsAre("--config", "x.yaml", "epochs=3"));
  EXPECT_THAT(folders(plan), ElementsAre("optimizer.lr=0.05,seed=0", "optimizer.lr=0.05,seed=1",
                                         "optimizer.lr=0.05,seed=2", "optimizer.lr=0.1,seed=0",
                                         "optimizer.lr=0.1,seed=1", "optimizer.lr=0.1,seed=2"));
  EXPECT_THAT(plan.runs.back().values, ElementsAre("0.1", "2"));
  EXPECT_THAT(plan.runs.back().settings, ElementsAre("optimizer.lr=0.1", "--seed=2"));
  EXPECT_EQ(plan.label(plan.runs.back()), "optimizer.lr=0.1 seed=2");
}

TEST(SweepPlanTest, RangesMayBeMixedWithValuesAndBeNegative) {
  EXPECT_THAT(folders(plan_sweep({"seed=-1..1,7"})),
              ElementsAre("seed=-1", "seed=0", "seed=1", "seed=7"));
  EXPECT_THAT(plan_sweep({"seed=3..3", "epochs=1,2"}).arguments, ElementsAre("seed=3"));
}

TEST(SweepPlanTest, CommasWithinBracketsAndQuotesDoNotCount) {
  const SweepPlan plan = plan_sweep({R"(name="a,b")", "schedule.milestones=[1,2],[2,3]",
                                     "model={type: resnet18, small_input: true},digits_net"});
  EXPECT_THAT(plan.arguments, ElementsAre(R"(name="a,b")"));
  EXPECT_THAT(plan.keys, ElementsAre("schedule.milestones", "model"));
  EXPECT_THAT(plan.runs[0].settings, ElementsAre("schedule.milestones=[1,2]",
                                                 "model={type: resnet18, small_input: true}"));
  EXPECT_THAT(plan.runs[3].settings, ElementsAre("schedule.milestones=[2,3]", "model=digits_net"));
}

TEST(SweepPlanTest, OptionsWithoutAValueDoNotTakeTheNextWord) {
  const SweepPlan plan = plan_sweep({"--amp", "seed=0,1", "--deterministic", "--epochs", "1,2"});
  EXPECT_THAT(plan.arguments, ElementsAre("--amp", "--deterministic"));
  EXPECT_THAT(plan.keys, ElementsAre("seed", "epochs"));
}

TEST(SweepPlanTest, FoldersAreFileNames) {
  const SweepPlan plan = plan_sweep({"init=/data/a b.pt,/data/c.pt"});
  EXPECT_THAT(folders(plan), ElementsAre("init=_data_a_b.pt", "init=_data_c.pt"));
  EXPECT_THAT(folders(plan_sweep({"init=\u00e4,\u00fc"})),
              ElementsAre("init=\u00e4", "init=\u00fc"));
  const std::string text(400, 'x');
  const SweepPlan long_names = plan_sweep({"init=" + text + "1," + text + "2"});
  EXPECT_EQ(long_names.runs[0].folder.size(), 200U);
  EXPECT_NE(long_names.runs[0].folder, long_names.runs[1].folder);
}

TEST(SweepPlanTest, RefusesWhatIsNoSweep) {
  EXPECT_THAT(refusal({"--config", "x.yaml", "seed=1"}), HasSubstr("no key has several values"));
  EXPECT_THAT(refusal({"seed=0..1000"}), HasSubstr("more than 1000 runs"));
  EXPECT_THAT(refusal({"seed=0..99", "epochs=1..99"}), HasSubstr("more than 1000 runs"));
  EXPECT_THAT(refusal({"seed=0..9223372036854775807"}), HasSubstr("more than 1000 runs"));
  EXPECT_THAT(refusal({"seed=2..0"}), HasSubstr("seed: the range 2..0"));
  EXPECT_THAT(refusal({"lr=0.1,,0.2"}), HasSubstr("lr: an empty value in '0.1,,0.2'"));
  EXPECT_THAT(refusal({"seed=1,2,1"}), HasSubstr("the same folder, seed=1"));
  EXPECT_THAT(refusal({"seed=1,2", "--seed=3,4"}), HasSubstr("seed has several values twice"));
  EXPECT_THAT(refusal({"init=a b,a_b"}), HasSubstr("the same folder"));
  EXPECT_THAT(refusal({"seed=1,2", "--seed", "3"}), HasSubstr("seed has several values, and a"));
  EXPECT_THAT(refusal({"lr=[0.1,0.2"}), HasSubstr("brackets or quotes do not match in '[0.1"));
  EXPECT_THAT(refusal({"lr=0.1]],0.2"}), HasSubstr("lr: brackets or quotes do not match"));
}

TEST(SweepPlanTest, RefusesValuesForWhatItSetsItself) {
  for (const std::string word :
       {"run_dir=a,b", "--run-dir=a,b", "--resume=a,b", "overwrite=true,false",
        "--config=a.yaml,b.yaml", "checkpoint.keep_best.metric=loss,accuracy"}) {
    EXPECT_THAT(refusal({word}), HasSubstr("cannot have several values")) << word;
  }
}

class SweepTableTest : public ::testing::Test {
 protected:
  /// Adds a run of `plan_` whose result.json has this text; without the file if the text is empty.
  void add(const std::string& result, const std::string& state) {
    const auto* run = &plan_.runs[results_.size()];
    std::filesystem::create_directory(folder_ / run->folder);
    if (!result.empty()) folder_.write(run->folder + "/result.json", result);
    results_.push_back({.run = run, .folder = folder_ / run->folder, .state = state});
  }

  test::TempFolder folder_;
  SweepPlan plan_ = plan_sweep({"seed=8..10"});
  std::vector<SweepResult> results_;
};

TEST_F(SweepTableTest, BestIsOnTopAndWhatHasNoResultLast) {
  add(R"({"best_val_top1": 0.25, "best_mode": "max", "best_epoch": 1, "val_loss": 2.5,
          "seconds": 1.25, "seed": 8})",
      "finished");
  add("", "failed (75)");
  add(R"({"best_val_top1": 0.75, "best_mode": "max", "best_epoch": 3, "val_loss": null,
          "seconds": 100.0, "seed": 10})",
      "finished");
  EXPECT_EQ(sweep_table(plan_, results_),
            "seed  best_val_top1  best_epoch  val_loss     seconds  state\n"
            "  10         0.7500           3       nan  1 min 40 s  finished\n"
            "   8         0.2500           1    2.5000       1.2 s  finished\n"
            "   9                                                   failed (75)\n");
}

TEST_F(SweepTableTest, SharesAreInPercent) {
  add(R"({"best_val_accuracy": 0.98227, "best_mode": "max", "best_epoch": 1, "val_loss": 0.25})",
      "finished");
  EXPECT_EQ(sweep_table(plan_, results_),
            "seed  best_val_accuracy  best_epoch  val_loss  seconds  state\n"
            "   8            98.23 %           1    0.2500           finished\n");
}

TEST_F(SweepTableTest, LowestIsBestForALoss) {
  add(R"({"best_val_loss": 0.75, "best_mode": "min", "best_epoch": 1})", "finished");
  add(R"({"best_val_loss": 0.25, "best_mode": "min", "best_epoch": 2})", "finished");
  add(R"({"best_val_loss": null, "best_mode": "min", "best_epoch": 0})", "finished");
  const std::string table = sweep_table(plan_, results_);
  EXPECT_LT(table.find("0.2500"), table.find("0.7500"));
  EXPECT_LT(table.find("0.7500"), table.find("\n  10"));
}

TEST_F(SweepTableTest, ShowsWhatMakesResultsIncomparable) {
  add(R"({"best_val_top1": 0.5, "best_mode": 3, "best_epoch": 1, "epochs": 2, "world_size": 2})",
      "finished");
  add(R"({"best_val_top1": 0.25, "best_epoch": 1, "epochs": 2, "world_size": 1})", "finished");
  add("{damaged", "finished");
  EXPECT_EQ(sweep_table(plan_, results_),
            "seed  best_val_top1  best_epoch  world_size  seconds  state\n"
            "   8         0.5000           1           2           finished\n"
            "   9         0.2500           1           1           finished\n"
            "  10                                                  finished, result.json missing "
            "or damaged\n");
}

TEST_F(SweepTableTest, OnlyFinishedRunsHaveResults) {
  add(R"({"best_val_top1": 0.5, "best_epoch": 1})", "not run");
  EXPECT_EQ(sweep_table(plan_, results_), "seed  state\n   8  not run\n");
}

TEST_F(SweepTableTest, CsvHasEveryValueInTheOrderOfTheRuns) {
  add(R"({"best_val_top1": 0.123456789, "seed": 8, "note": "a \"b\", c"})", "finished");
  add("{damaged", "stopped");
  add(R"({"best_val_top1": 1.0, "seed": 10, "steps": 7})", "finished");
  const std::string path = folder_.path().string();
  EXPECT_EQ(sweep_csv(plan_, results_),
            "seed,best_val_top1,note,steps,state,folder\n"
            "8,0.123456789,\"a \"\"b\"\", c\",,finished," +
                path +
                "/seed=8\n"
                "9,,,,stopped," +
                path +
                "/seed=9\n"
                "10,1.0,,7,finished," +
                path + "/seed=10\n");
}

TEST_F(SweepTableTest, WithoutAnyResultThereAreStates) {
  for (int i = 0; i < 3; ++i) add("", "not run");
  EXPECT_EQ(sweep_table(plan_, results_),
            "seed  state\n   8  not run\n   9  not run\n  10  not run\n");
}

}  // namespace
}  // namespace syncbn::train
