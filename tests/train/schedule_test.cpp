#include <gtest/gtest.h>
#include <syncbn/train/schedule.h>

#include "train/from_yaml.h"

namespace syncbn::train {
namespace {

std::unique_ptr<Schedule> schedule(const std::string& yaml, const ScheduleArgs& args) {
  return from_yaml<ScheduleKind>(yaml, "schedule").make(args);
}

TEST(ScheduleTest, ConstantStaysAtTheOptimizersRate) {
  const auto constant = schedule("constant", {.lr = 0.3, .epochs = 2, .steps_per_epoch = 5});
  EXPECT_EQ(constant->lr(0), 0.3);
  EXPECT_EQ(constant->lr(9), 0.3);
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

TEST(ScheduleTest, CosineWithWarmupOnlyNeverPassesTheRate) {
  const auto cosine =
      schedule("{type: cosine, warmup: 9}", {.lr = 1, .epochs = 1, .steps_per_epoch = 4});
  EXPECT_DOUBLE_EQ(cosine->lr(0), 0.25);
  EXPECT_DOUBLE_EQ(cosine->lr(3), 1);
}

}  // namespace
}  // namespace syncbn::train
