#include <syncbn/train/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "optimizers/optimizer_options.h"

namespace syncbn::train {
namespace {

/// Any function of the step as a schedule.
template <class Function>
class FunctionSchedule : public Schedule {
 public:
  explicit FunctionSchedule(Function function) : function_(std::move(function)) {}
  double lr(int64_t step) const override { return function_(step); }

 private:
  Function function_;
};

template <class Function>
std::unique_ptr<Schedule> from(Function function) {
  return std::make_unique<FunctionSchedule<Function>>(std::move(function));
}

// Anything above is a typing error.
constexpr double kMaxEpochs = 1e6;
constexpr double kMaxFactor = 1000;

struct ConstantOptions {
  static void describe(config::Schema<ConstantOptions>&) {}
};

struct StepOptions {
  int64_t step_size = 30;
  double gamma = 0.1;

  static void describe(config::Schema<StepOptions>& schema) {
    schema.field("step_size", &StepOptions::step_size, "epochs between two changes")
        .at_least(1)
        .at_most(kMaxEpochs)
        .unit("epochs");
    schema.field("gamma", &StepOptions::gamma, "what the rate is multiplied by")
        .above(0)
        .at_most(kMaxFactor);
  }
};

struct CosineOptions {
  double warmup = 0;
  double min_lr = 0;

  static void describe(config::Schema<CosineOptions>& schema) {
    schema.field("warmup", &CosineOptions::warmup, "rise linearly from 0 for so long")
        .at_least(0)
        .at_most(kMaxEpochs)
        .unit("epochs");
    schema.field("min_lr", &CosineOptions::min_lr, "the rate at the end")
        .at_least(0)
        .at_most(kMaxRate);
  }
};

double cosine_lr(const CosineOptions& options, const ScheduleArgs& args, int64_t step) {
  const double total = static_cast<double>(args.epochs * args.steps_per_epoch);
  const double warmup = std::min(options.warmup * static_cast<double>(args.steps_per_epoch), total);
  const double at = static_cast<double>(step);
  // The first step already learns: it is the end of its own part of the rise.
  if (at < warmup) return args.lr * (at + 1) / std::max(warmup, 1.0);
  const double part = total > warmup ? std::min((at - warmup) / (total - warmup), 1.0) : 1.0;
  return options.min_lr + (args.lr - options.min_lr) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

ScheduleKind::Registry make_registry() {
  ScheduleKind::Registry registry;
  registry.add<ConstantOptions>("constant", "the same all the time",
                                [](const ConstantOptions&, const ScheduleArgs& args) {
                                  return from([lr = args.lr](int64_t) { return lr; });
                                });
  registry.add<StepOptions>(
      "step", "multiplied by gamma every step_size epochs",
      [](const StepOptions& options, const ScheduleArgs& args) {
        return from([options, args](int64_t step) {
          const int64_t changes = step / args.steps_per_epoch / options.step_size;
          return args.lr * std::pow(options.gamma, static_cast<double>(changes));
        });
      });
  registry.add<CosineOptions>(
      "cosine", "falls along a cosine, step by step, to min_lr",
      [](const CosineOptions& options, const ScheduleArgs& args) {
        return from([options, args](int64_t step) { return cosine_lr(options, args, step); });
      });
  return registry;
}

}  // namespace

ScheduleKind::Registry& ScheduleKind::registry() {
  static Registry registry = make_registry();
  return registry;
}

}  // namespace syncbn::train
