#include <fmt/format.h>
#include <gtest/gtest.h>
#include <syncbn/base/text.h>
#include <syncbn/train/schedule.h>

#include <sstream>

#include "support/from_yaml.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::train {
namespace {

constexpr double kLr = 0.3;
constexpr int64_t kEpochs = 9;
constexpr int64_t kStepsPerEpoch = 7;

struct Case {
  std::string yaml;
  std::string
      python;  ///< an expression of `o`, the optimizer, `E`, epochs, and `S`, steps per epoch
  bool by_epoch = false;     ///< Python's scheduler steps once an epoch
  double tolerance = 1e-12;  ///< relative; 0: the same bits
};

/// Prints a line per scheduler: the rates of its steps.
constexpr const char* kRates = R"(
import sys, torch
from torch.optim.lr_scheduler import *
E, S = 9, 7
for case in sys.argv[1:]:
    steps, expression = case.split(" ", 1)
    o = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    warm = lambda start, length: LinearLR(o, start, total_iters=length)
    scheduler = eval(expression)
    rates = []
    for step in range(int(steps)):
        rates.append(o.param_groups[0]["lr"])
        o.step()
        scheduler.step()
    print(*rates)
)";

void expect_rates_of_python(const std::vector<Case>& cases) {
  std::vector<std::string> command = {test::python(), "-W", "ignore", "-c", kRates};
  for (const Case& one : cases) {
    command.push_back(
        fmt::format("{} {}", one.by_epoch ? kEpochs : kEpochs * kStepsPerEpoch, one.python));
  }
  const auto result = test::run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::istringstream lines(result.out);
  for (const Case& one : cases) {
    std::string line;
    std::getline(lines, line);
    std::istringstream rates(line);
    const auto mine =
        test::from_yaml<ScheduleKind>(one.yaml, "schedule")
            .make(ScheduleArgs{.lr = kLr, .epochs = kEpochs, .steps_per_epoch = kStepsPerEpoch});
    double expected = 0;
    for (int64_t step = 0; step < kEpochs * kStepsPerEpoch; ++step) {
      if (!one.by_epoch || step % kStepsPerEpoch == 0) {
        ASSERT_TRUE(rates >> expected) << one.python;
      }
      EXPECT_NEAR(mine->lr(step), expected, one.tolerance * expected)
          << one.yaml << " and " << one.python << ", step " << step;
    }
  }
}

TEST(SchedulePythonTest, RatesAreThoseOfPythonInEachStep) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  expect_rates_of_python({
      {"constant", "ConstantLR(o, 1)"},
      {"{type: step, step_size: 2, gamma: 0.3}", "StepLR(o, 2 * S, 0.3)"},
      {"{type: multistep, milestones: [3, 5, 5], gamma: 0.3}",
       "MultiStepLR(o, [3 * S, 5 * S, 5 * S], 0.3)"},
      {"{type: exponential, gamma: 0.8}", "ExponentialLR(o, 0.8 ** (1 / S))"},
      {"{type: cosine, min_lr: 0.01}", "CosineAnnealingLR(o, E * S, 0.01)"},
      {"{type: cosine}", "CosineAnnealingLR(o, E * S)"},
      {"{type: poly, power: 0.9}", "PolynomialLR(o, E * S, 0.9)"},
      {"onecycle", "OneCycleLR(o, 0.3, E * S, cycle_momentum=False)"},
      {"{type: onecycle, max_factor: 2, pct_start: 0.4, anneal_strategy: linear, div_factor: 10, "
       "final_div_factor: 100, three_phase: true}",
       "OneCycleLR(o, 0.6, epochs=E, steps_per_epoch=S, pct_start=0.4, anneal_strategy='linear', "
       "div_factor=10, final_div_factor=100, three_phase=True, cycle_momentum=False)"},
      {"{type: onecycle, pct_start: 0.9, three_phase: false}",
       "OneCycleLR(o, 0.3, E * S, pct_start=0.9, cycle_momentum=False)"},
  });
}

TEST(SchedulePythonTest, RatesHaveTheBitsOfPythonInEachEpoch) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  expect_rates_of_python({
      {"{type: step, step_size: 2, gamma: 0.3, by_epoch: true}", "StepLR(o, 2, 0.3)", true, 0},
      {"{type: step, step_size: 1, gamma: 0.7}", "StepLR(o, 1, 0.7)", true, 0},
      {"{type: multistep, milestones: [1, 3, 4, 7]}", "MultiStepLR(o, [1, 3, 4, 7])", true, 0},
      {"{type: exponential, gamma: 0.8, by_epoch: true}", "ExponentialLR(o, 0.8)", true, 0},
      {"{type: cosine, by_epoch: true}", "CosineAnnealingLR(o, E)", true, 0},
      {"{type: cosine, min_lr: 0.01, by_epoch: true}", "CosineAnnealingLR(o, E, 0.01)", true, 0},
      {"{type: poly, power: 2, by_epoch: true}", "PolynomialLR(o, E, 2)", true},
  });
}

TEST(SchedulePythonTest, WarmupIsThatOfPython) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  expect_rates_of_python({
      {"{type: constant, warmup: 2, warmup_start: 0.1}", "warm(0.1, 2 * S)"},
      {"{type: step, step_size: 2, gamma: 0.3, warmup: 3, warmup_start: 0.1}",
       "SequentialLR(o, [warm(0.1, 3 * S), StepLR(o, 2 * S, 0.3)], [3 * S])"},
      {"{type: multistep, milestones: [1, 4], warmup: 2, warmup_start: 0.5}",
       "SequentialLR(o, [warm(0.5, 2 * S), MultiStepLR(o, [S, 4 * S])], [2 * S])"},
      {"{type: exponential, gamma: 0.7, warmup: 1, warmup_start: 0.01}",
       "SequentialLR(o, [warm(0.01, S), ExponentialLR(o, 0.7 ** (1 / S))], [S])"},
      {"{type: cosine, min_lr: 0.02, warmup: 2, warmup_start: 0.01}",
       "SequentialLR(o, [warm(0.01, 2 * S), CosineAnnealingLR(o, 7 * S, 0.02)], [2 * S])"},
      {"{type: poly, warmup: 2, warmup_start: 0.25}",
       "SequentialLR(o, [warm(0.25, 2 * S), PolynomialLR(o, 7 * S)], [2 * S])"},
      // The schedules of torchvision's reference scripts.
      {"{type: cosine, warmup: 5, warmup_start: 0.01, by_epoch: true}",
       "SequentialLR(o, [warm(0.01, 5), CosineAnnealingLR(o, E - 5)], [5])", true, 0},
      {"{type: cosine, min_lr: 0.02, warmup: 3, warmup_start: 0.1, by_epoch: true}",
       "SequentialLR(o, [warm(0.1, 3), CosineAnnealingLR(o, E - 3, 0.02)], [3])", true, 1e-15},
      {"{type: step, step_size: 3, warmup: 2, warmup_start: 0.01, by_epoch: true}",
       "SequentialLR(o, [warm(0.01, 2), StepLR(o, 3)], [2])", true, 0},
      {"{type: exponential, gamma: 0.7, warmup: 4, warmup_start: 0.3, by_epoch: true}",
       "SequentialLR(o, [warm(0.3, 4), ExponentialLR(o, 0.7)], [4])", true, 0},
      // By default, the warmup begins at 1 / steps.
      {"{type: constant, warmup: 2}", "LambdaLR(o, lambda step: min((step + 1) / (2 * S), 1))"},
  });
}

/// Prints the rates after each of the given losses.
constexpr const char* kPlateau = R"(
import sys, torch
losses = [float(loss) for loss in sys.argv[1].split()]
for expression in sys.argv[2:]:
    o = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = eval('torch.optim.lr_scheduler.ReduceLROnPlateau(o, ' + expression + ')')
    for loss in losses:
        scheduler.step(loss)
        print(o.param_groups[0]["lr"], end=" ")
    print()
)";

TEST(SchedulePythonTest, PlateauIsThatOfPython) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const std::vector<std::string> losses = {
      "3", "2", "2", "2.1", "nan", "1.99", "1.9999", "1.9", "1.9", "1.89", "1.9", "1.88", "2",  "2",
      "2", "2", "2", "0.5", "0.5", "0.5",  "0.6",    "0.5", "0.5", "0.5",  "0.5", "0.5",  "0.5"};
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"plateau", "factor=0.1"},
      {"{type: plateau, patience: 0, factor: 0.7}", "patience=0, factor=0.7"},
      {"{type: plateau, patience: 1, cooldown: 2, factor: 0.5, min_lr: 0.02}",
       "patience=1, cooldown=2, factor=0.5, min_lr=0.02"},
      {"{type: plateau, patience: 1, threshold: 0.05, threshold_mode: abs, eps: 0.01}",
       "patience=1, threshold=0.05, threshold_mode='abs', eps=0.01"},
      {"{type: plateau, patience: 2, threshold: 0.02}", "patience=2, threshold=0.02"}};
  std::vector<std::string> command = {test::python(), "-c", kPlateau, base::join(losses, " ")};
  for (const auto& [yaml, python] : cases) command.push_back(python);
  const auto result = test::run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::istringstream rates(result.out);
  for (const auto& [yaml, python] : cases) {
    const auto component = test::from_yaml<ScheduleKind>(yaml, "schedule");
    auto mine = component.make(ScheduleArgs{.lr = kLr, .epochs = 100, .steps_per_epoch = 2});
    for (size_t i = 0; i < losses.size(); ++i) {
      mine->observe(std::stod(losses[i]));
      // As in a run that stops and resumes after each evaluation.
      const auto state = mine->state();
      mine = component.make(ScheduleArgs{.lr = kLr, .epochs = 100, .steps_per_epoch = 2});
      mine->load(state);
      double expected = 0;
      ASSERT_TRUE(rates >> expected);
      EXPECT_NEAR(mine->lr(static_cast<int64_t>(i)), expected, 1e-12 * expected)
          << yaml << " after loss " << i;
    }
  }
}

}  // namespace
}  // namespace syncbn::train
