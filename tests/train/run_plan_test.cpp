#include "run_plan.h"

#include <gtest/gtest.h>
#include <syncbn/data/synthetic.h>

namespace syncbn::train {
namespace {

/// A run with 4 steps per epoch.
class RunPlanTest : public testing::Test {
 protected:
  RunPlanTest() { config_.epochs = 3; }

  /// Moves the run to the state after this step, for which the loader has returned the batch.
  void move_to(int64_t step) {
    position_.sampler.epoch = (step - 1) / 4;
    position_.step = step;
    loader_.start_epoch(position_.sampler.epoch);
    for (int64_t batch = 0; batch <= (step - 1) % 4; ++batch) loader_.next();
    position_.sampler.consumed = loader_.state().consumed;
  }

  /// The steps after which `is_due()` holds.
  template <class IsDue>
  std::vector<int64_t> steps(const IsDue& is_due) {
    std::vector<int64_t> found;
    for (int64_t step = 1; step <= 12; ++step) {
      move_to(step);
      if (is_due()) found.push_back(step);
    }
    return found;
  }

  Config config_;
  data::Loader loader_{data::make_synthetic({.size = 8, .channels = 1, .height = 2, .width = 2},
                                            data::Split::kTrain),
                       data::LoaderOptions{.batch_size = 2, .num_workers = 0}};
  Checkpoint position_;
  RunPlan plan_{config_, loader_, position_};
};

TEST_F(RunPlanTest, SavesAfterStepsAndPartsOfEpochs) {
  const auto saves = [&](double count, config::Duration::Unit unit) {
    config_.checkpoint.every = {.unit = unit, .count = count};
    return steps([&] { return plan_.saves(); });
  };
  EXPECT_EQ(saves(5, config::Duration::Unit::kSteps), (std::vector<int64_t>{5, 10}));
  EXPECT_EQ(saves(2, config::Duration::Unit::kEpochs), (std::vector<int64_t>{8}));
  EXPECT_EQ(saves(0.5, config::Duration::Unit::kEpochs),
            (std::vector<int64_t>{2, 4, 6, 8, 10, 12}));
  EXPECT_TRUE(saves(1, config::Duration::Unit::kSeconds).empty());
}

TEST_F(RunPlanTest, EvaluatesAtIntervalsAndAtTheEnd) {
  config_.eval_interval = 2;
  EXPECT_FALSE(plan_.evaluates(1));
  EXPECT_TRUE(plan_.evaluates(2));
  EXPECT_TRUE(plan_.evaluates(3));  // the last one
  config_.max_steps = 3;
  move_to(3);
  EXPECT_TRUE(plan_.evaluates(1));
  EXPECT_FALSE(plan_.evaluates_whole(1));
}

TEST_F(RunPlanTest, EndsByStepsByPatienceOrByEpochs) {
  config_.max_steps = 6;
  EXPECT_EQ(steps([&] { return plan_.is_over(); }), (std::vector<int64_t>{6, 7, 8, 9, 10, 11, 12}));
  config_.max_steps.reset();
  move_to(12);
  EXPECT_FALSE(plan_.is_over());
  position_.sampler = plan_.end_of_epoch();
  EXPECT_EQ(position_.sampler.epoch, 3);
  EXPECT_EQ(position_.sampler.consumed, 0);
  EXPECT_TRUE(plan_.is_over());
  move_to(4);
  config_.early_stop.patience = 2;
  position_.stale_evaluations = 2;
  EXPECT_TRUE(plan_.stopped_early());
  EXPECT_TRUE(plan_.is_over());
}

TEST_F(RunPlanTest, OwesWhatEndedInAnEvaluation) {
  config_.eval_interval = 2;
  const auto after = [&](const EpochRecord& record) {
    position_.epoch_line = line_of(record);
    return plan_.owes_evaluation();
  };
  EXPECT_FALSE(plan_.owes_evaluation());  // a new run
  EXPECT_FALSE(after({.epoch = 1}));      // none was due
  EXPECT_TRUE(after({.epoch = 2}));
  EXPECT_FALSE(after({.epoch = 2, .eval = {{"loss", 1}}, .eval_split = "test"}));
  config_.eval_interval = 1;  // of the resumed run
  EXPECT_TRUE(after({.epoch = 1}));
  move_to(6);
  EXPECT_FALSE(after({.epoch = 1})) << "the network has trained on";
  config_.max_steps = 6;
  move_to(6);
  EXPECT_TRUE(plan_.owes_last_evaluation());
  EXPECT_EQ(plan_.total_steps(), 6);
}

TEST_F(RunPlanTest, CountsTheStepsThatAreLeftAlsoAfterAnotherBatchSize) {
  move_to(6);
  EXPECT_EQ(plan_.batches_done(), 6);
  EXPECT_EQ(plan_.total_steps(), 12);
  position_.step = 3;  // the first half used batches of twice the size
  EXPECT_EQ(plan_.total_steps(), 9);
}

}  // namespace
}  // namespace syncbn::train
