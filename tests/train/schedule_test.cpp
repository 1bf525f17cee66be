#include <gtest/gtest.h>
#include <syncbn/train/schedule.h>

#include "support/from_yaml.h"

namespace syncbn::train {
namespace {

std::unique_ptr<Schedule> schedule(const std::string& yaml, const ScheduleArgs& args) {
  return test::from_yaml<ScheduleKind>(yaml, "schedule").make(args);
}

TEST(ScheduleTest, ConstantStaysAtTheOptimizersRate) {
  const auto constant = schedule("constant", {.lr = 0.3, .epochs = 2, .steps_per_epoch = 5});
  EXPECT_EQ(constant->lr(0), 0.3);
  EXPECT_EQ(constant->lr(9), 0.3);
  EXPECT_EQ(constant->warmup_steps(), 0);
}

TEST(ScheduleTest, StepFallsEveryFewEpochs) {
  const auto step = schedule("{type: step, step_size: 2, gamma: 0.5}",
                             {.lr = 1, .epochs = 6, .steps_per_epoch = 10});
  EXPECT_DOUBLE_EQ(step->lr(0), 1);
  EXPECT_DOUBLE_EQ(step->lr(19), 1);
  EXPECT_DOUBLE_EQ(step->lr(20), 0.5);
  EXPECT_DOUBLE_EQ(step->lr(59), 0.25);
}

TEST(ScheduleTest, CosineFallsFromTheRateToMinLr) {
  const auto cosine =
      schedule("{type: cosine, min_lr: 0.2}", {.lr = 1, .epochs = 4, .steps_per_epoch = 25});
  EXPECT_DOUBLE_EQ(cosine->lr(0), 1);
  EXPECT_DOUBLE_EQ(cosine->lr(50), 0.6);
  EXPECT_DOUBLE_EQ(cosine->lr(100), 0.2);
  for (int64_t step = 1; step < 100; ++step) EXPECT_LT(cosine->lr(step), cosine->lr(step - 1));
}

TEST(ScheduleTest, CosineRisesLinearlyWhileItWarmsUp) {
  const auto cosine =
      schedule("{type: cosine, warmup: 0.5}", {.lr = 1, .epochs = 3, .steps_per_epoch = 20});
  EXPECT_DOUBLE_EQ(cosine->lr(0), 0.1);
  EXPECT_DOUBLE_EQ(cosine->lr(4), 0.5);
  EXPECT_DOUBLE_EQ(cosine->lr(9), 1);
  EXPECT_DOUBLE_EQ(cosine->lr(10), 1);
  EXPECT_LT(cosine->lr(11), 1);
  EXPECT_NEAR(cosine->lr(60), 0, 1e-12);
}

TEST(ScheduleTest, AWarmupMayBeGivenInSteps) {
  const ScheduleArgs args{.lr = 1, .epochs = 3, .steps_per_epoch = 20};
  const auto epochs = schedule("{type: cosine, warmup: 0.5}", args);
  for (const std::string same : {"10step", "0.5ep"}) {
    const auto other = schedule("{type: cosine, warmup: " + same + "}", args);
    for (int64_t step = 0; step < 60; ++step) EXPECT_EQ(other->lr(step), epochs->lr(step)) << same;
    EXPECT_EQ(other->warmup_steps(), 10) << same;
  }
}

TEST(ScheduleTest, CosineWithWarmupOnlyNeverPassesTheRate) {
  const auto cosine =
      schedule("{type: cosine, warmup: 9}", {.lr = 1, .epochs = 1, .steps_per_epoch = 4});
  EXPECT_DOUBLE_EQ(cosine->lr(0), 0.25);
  EXPECT_DOUBLE_EQ(cosine->lr(3), 1);
  EXPECT_EQ(cosine->warmup_steps(), 36) << "as configured, for a warning";
}

TEST(ScheduleTest, WarmupMayEndWithinAnEpoch) {
  const auto constant =
      schedule("{type: constant, warmup: 0.5}", {.lr = 1, .epochs = 2, .steps_per_epoch = 5});
  EXPECT_DOUBLE_EQ(constant->lr(0), 0.4);
  EXPECT_DOUBLE_EQ(constant->lr(1), 0.8);
  EXPECT_DOUBLE_EQ(constant->lr(2), 1);
  EXPECT_DOUBLE_EQ(constant->lr(3), 1);
}

TEST(ScheduleTest, RatesStayWithinBoundsWhateverTheLengths) {
  for (const char* yaml :
       {"constant", "{type: step, step_size: 1}", "{type: multistep, milestones: [0, 1]}",
        "exponential", "cosine", "poly", "plateau", "onecycle", "{type: onecycle, pct_start: 0}",
        "{type: onecycle, pct_start: 1, three_phase: true}", "{type: poly, warmup: 0.3}",
        "{type: cosine, warmup: 9, warmup_start: 0.5}", "{type: poly, warmup: 1, by_epoch: true}",
        "{type: step, warmup: 0.5, by_epoch: true}"}) {
    for (const int64_t epochs : {1, 2, 3}) {
      for (const int64_t steps : {1, 2, 5}) {
        const auto made = schedule(yaml, {.lr = 1, .epochs = epochs, .steps_per_epoch = steps});
        // One step more, because logs ask for the rate after the last step.
        for (int64_t step = 0; step <= epochs * steps; ++step) {
          EXPECT_GE(made->lr(step), 0) << yaml << " step " << step;
          EXPECT_LE(made->lr(step), 1) << yaml << " step " << step;
        }
      }
    }
  }
}

TEST(ScheduleTest, PlateauWarmsUpToWhateverRateIsLeft) {
  const auto plateau =
      schedule("{type: plateau, patience: 0, factor: 0.5, warmup: 2, warmup_start: 0.2}",
               {.lr = 1, .epochs = 5, .steps_per_epoch = 10});
  EXPECT_DOUBLE_EQ(plateau->lr(0), 0.2);
  EXPECT_DOUBLE_EQ(plateau->lr(10), 0.6);
  plateau->observe(1);
  plateau->observe(2);
  EXPECT_DOUBLE_EQ(plateau->lr(10), 0.3);
  EXPECT_DOUBLE_EQ(plateau->lr(20), 0.5);
}

TEST(ScheduleTest, PlateauResumesWithAnotherRateOfTheOptimizer) {
  const ScheduleArgs args{.lr = 1, .epochs = 5, .steps_per_epoch = 10};
  const auto first = schedule("{type: plateau, patience: 0}", args);
  first->observe(1);
  first->observe(1);
  EXPECT_DOUBLE_EQ(first->lr(0), 0.1);
  const auto second = schedule("{type: plateau, patience: 0}", {.lr = 3});
  second->load(first->state());
  EXPECT_DOUBLE_EQ(second->lr(0), 0.3);
  second->load({});
  EXPECT_DOUBLE_EQ(second->lr(0), 3);
}

}  // namespace
}  // namespace syncbn::train
