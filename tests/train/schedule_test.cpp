#include <gtest/gtest.h>
#include <syncbn/train/schedule.h>

#include <iterator>
#include <sstream>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
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

/// Prints the rates of torch.optim.lr_scheduler: 6 epochs of 10 steps, lr 0.4.
constexpr const char* kPythonRates = R"(
import math, torch
from torch.optim.lr_scheduler import *
def optimizer():
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.4)
def rates(make, count, repeat=1):
    o = optimizer(); s = make(o); out = []
    for i in range(count):
        out += [o.param_groups[0]["lr"]] * repeat
        o.step(); s.step()
    print(*map(repr, out))
def warm(main, rise):
    return lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=rise), main(o)], [rise])
rates(lambda o: StepLR(o, 2, 0.3), 6, 10)
rates(lambda o: MultiStepLR(o, [1, 4], 0.3), 6, 10)
rates(lambda o: ExponentialLR(o, 0.7), 6, 10)
rates(lambda o: CosineAnnealingLR(o, 60, 0.01), 60)
rates(lambda o: CosineAnnealingLR(o, 6, 0.01), 6, 10)
rates(lambda o: PolynomialLR(o, 60, 0.9), 60)
rates(lambda o: OneCycleLR(o, 0.4, total_steps=60), 60)
rates(lambda o: OneCycleLR(o, 0.4, total_steps=60, pct_start=0.1, div_factor=5, final_div_factor=50), 60)
rates(warm(lambda o: CosineAnnealingLR(o, 40), 20), 60)
rates(warm(lambda o: CosineAnnealingLR(o, 4), 2), 6, 10)
rates(warm(lambda o: PolynomialLR(o, 45, 2), 15), 60)
rates(warm(lambda o: MultiStepLR(o, [10, 30], 0.2), 20), 60)
o = optimizer(); s = ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1, min_lr=0.02, threshold=0.01)
out = []
for loss in (5, 4, 4.5, 4.4, 4.1, 3.99, 3.98, 3.97, 3.96, 3.95, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2):
    s.step(loss); out.append(o.param_groups[0]["lr"])
print(*map(repr, out))
)";

std::vector<double> rates(const std::string& yaml) {
  const auto made = schedule(yaml, {.lr = 0.4, .epochs = 6, .steps_per_epoch = 10});
  std::vector<double> all;
  for (int64_t step = 0; step < 60; ++step) all.push_back(made->lr(step));
  return all;
}

TEST(ScheduleTest, GivesTheRatesOfPythonsSchedulers) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const auto python = test::run_program({test::python(), "-W", "ignore", "-c", kPythonRates});
  ASSERT_EQ(python.exit_code, 0) << python.err;
  std::istringstream lines(python.out);
  const auto expect = [&](const std::string& what, const std::vector<double>& ours) {
    std::string line;
    std::getline(lines, line);
    std::istringstream numbers(line);
    const std::vector<double> theirs{std::istream_iterator<double>(numbers), {}};
    ASSERT_EQ(theirs.size(), ours.size()) << what;
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_NEAR(ours[i], theirs[i], 1e-12 + 1e-12 * theirs[i]) << what << ", step " << i;
    }
  };
  for (const char* yaml :
       {"{type: step, step_size: 2, gamma: 0.3}",
        "{type: multistep, milestones: [1, 4], gamma: 0.3}",
        "{type: exponential, gamma: 0.7, by_epoch: true}", "{type: cosine, min_lr: 0.01}",
        "{type: cosine, min_lr: 0.01, by_epoch: true}", "{type: poly, power: 0.9}", "onecycle",
        "{type: onecycle, pct_start: 0.1, div_factor: 5, final_div_factor: 50}",
        "{type: cosine, warmup: 2, warmup_start: 0.1}",
        "{type: cosine, warmup: 2, warmup_start: 0.1, by_epoch: true}",
        "{type: poly, power: 2, warmup: 1.5, warmup_start: 0.1}",
        "{type: multistep, milestones: [1, 3], gamma: 0.2, warmup: 2, warmup_start: 0.1}"}) {
    expect(yaml, rates(yaml));
  }
  const auto plateau = schedule(
      "{type: plateau, factor: 0.5, patience: 1, cooldown: 1, min_lr: 0.02, threshold: 0.01}",
      {.lr = 0.4, .epochs = 6, .steps_per_epoch = 10});
  std::vector<double> ours;
  for (const double loss : {5.0, 4.0, 4.5, 4.4, 4.1, 3.99, 3.98, 3.97, 3.96, 3.95, 2.0,
                            2.0, 2.0, 2.0, 2.0, 2.0, 2.0,  2.0,  2.0,  2.0,  2.0,  2.0}) {
    plateau->observe(loss);
    ours.push_back(plateau->lr(59));
  }
  expect("plateau", ours);
}

TEST(ScheduleTest, PlateauRemembersWhatItHasSeen) {
  const ScheduleArgs args{.lr = 1, .epochs = 6, .steps_per_epoch = 10};
  const std::string yaml = "{type: plateau, factor: 0.5, patience: 1}";
  const auto whole = schedule(yaml, args);
  const auto before = schedule(yaml, args);
  for (const double loss : {3.0, 4.0}) whole->observe(loss), before->observe(loss);
  const auto after = schedule(yaml, args);
  after->load(before->state());
  for (const double loss : {4.0, 4.0, 4.0}) {
    whole->observe(loss), after->observe(loss);
    EXPECT_EQ(after->lr(0), whole->lr(0));
  }
  EXPECT_EQ(whole->lr(0), 0.25);
}

}  // namespace
}  // namespace syncbn::train
