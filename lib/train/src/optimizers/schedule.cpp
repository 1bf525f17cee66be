#include <syncbn/train/schedule.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>

#include "optimizers/stateful_optimizer.h"

namespace syncbn::train {
namespace {

constexpr double kMaxFactor = 1000;  // more is a typing error

class FunctionSchedule : public Schedule {
 public:
  explicit FunctionSchedule(std::function<double(int64_t)> lr) : lr_(std::move(lr)) {}
  double lr(int64_t step) const override { return lr_(step); }

 private:
  std::function<double(int64_t)> lr_;
};

struct ConstantOptions {
  static void describe(config::Schema<ConstantOptions>&) {}
};

struct StepOptions {
  int64_t step_size = 30;
  double gamma = 0.1;

  static void describe(config::Schema<StepOptions>& schema) {
    schema.field("step_size", &StepOptions::step_size, "epochs between two changes")
        .between(1, kMaxEpochs)
        .unit("epochs");
    schema.field("gamma", &StepOptions::gamma, "factor of each change")
        .above(0)
        .at_most(kMaxFactor);
  }
};

struct CosineOptions {
  double warmup = 0;
  double min_lr = 0;

  static void describe(config::Schema<CosineOptions>& schema) {
    schema.field("warmup", &CosineOptions::warmup, "length of the linear rise from 0 at the start")
        .between(0, kMaxEpochs)
        .unit("epochs");
    schema.field("min_lr", &CosineOptions::min_lr, "the rate at the end").between(0, kMaxRate);
  }
};

double cosine_lr(const CosineOptions& options, const ScheduleArgs& args, int64_t step) {
  const double total = static_cast<double>(args.epochs * args.steps_per_epoch);
  const double warmup = std::min(options.warmup * static_cast<double>(args.steps_per_epoch), total);
  const double at = static_cast<double>(step);
  // + 1, so that the first step has a rate above 0.
  if (at < warmup) return args.lr * (at + 1) / std::max(warmup, 1.0);
  const double part = total > warmup ? std::min((at - warmup) / (total - warmup), 1.0) : 1.0;
  return options.min_lr + (args.lr - options.min_lr) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

}  // namespace

ScheduleKind::Registry& ScheduleKind::registry() {
  static Registry registry = [] {
    const auto make = [](std::function<double(int64_t)> lr) {
      return std::make_unique<FunctionSchedule>(std::move(lr));
    };
    Registry made;
    made.add<ConstantOptions>("constant", "the optimizer's lr in all steps",
                              [make](const ConstantOptions&, const ScheduleArgs& args) {
                                return make([lr = args.lr](int64_t) { return lr; });
                              });
    made.add<StepOptions>(
        "step", "multiplied by gamma every step_size epochs",
        [make](const StepOptions& options, const ScheduleArgs& args) {
          return make([options, args](int64_t step) {
            const int64_t changes = step / args.steps_per_epoch / options.step_size;
            return args.lr * std::pow(options.gamma, static_cast<double>(changes));
          });
        });
    made.add<CosineOptions>(
        "cosine", "falls along a cosine, step by step, to min_lr",
        [make](const CosineOptions& options, const ScheduleArgs& args) {
          return make([options, args](int64_t step) { return cosine_lr(options, args, step); });
        });
    return made;
  }();
  return registry;
}

}  // namespace syncbn::train
