#include <syncbn/train/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "optimizers/kinds.h"
#include "optimizers/warmup_schedule.h"

namespace syncbn::train {
namespace {

struct ConstantOptions : WarmupOptions {
  static void describe(config::Schema<ConstantOptions>& schema) { describe_warmup(schema); }

  double rate(double lr, const Position&) const { return lr; }
};

/// `lr` after `changes` factors of `gamma`. Multiplies at each change, as torch's schedulers do,
/// for the same bits.
double multiplied(double lr, double gamma, double changes) {
  for (double i = 0; i < changes; ++i) lr *= gamma;
  return lr;
}

template <class Options>
void describe_gamma(config::Schema<Options>& schema, const std::string& help) {
  schema.field("gamma", &Options::gamma, help).positive_up_to(kMaxFactor);
}

struct StepOptions : WarmupOptions {
  int64_t step_size = 30;
  double gamma = 0.1;

  static void describe(config::Schema<StepOptions>& schema) {
    schema.field("step_size", &StepOptions::step_size, "epochs between two changes")
        .between(1, kMaxEpochs)
        .unit("epochs");
    describe_gamma(schema, "factor of each change");
    describe_warmup(schema);
  }

  double rate(double lr, const Position& position) const {
    const double changes = position.at / (static_cast<double>(step_size) * position.epoch);
    return multiplied(lr, gamma, std::floor(changes));
  }
};

struct MultistepOptions : WarmupOptions {
  std::vector<int64_t> milestones;
  double gamma = 0.1;

  static void describe(config::Schema<MultistepOptions>& schema) {
    schema.field("milestones", &MultistepOptions::milestones, "epochs before the changes")
        .required()
        .between(0, kMaxEpochs)
        .unit("epochs");
    describe_gamma(schema, "factor of each change");
    describe_warmup(schema);
  }

  double rate(double lr, const Position& position) const {
    const auto changes = std::ranges::count_if(milestones, [&](int64_t milestone) {
      return static_cast<double>(milestone) * position.epoch <= position.at;
    });
    return multiplied(lr, gamma, static_cast<double>(changes));
  }
};

struct ExponentialOptions : WarmupOptions {
  double gamma = 0.95;

  static void describe(config::Schema<ExponentialOptions>& schema) {
    describe_gamma(schema, "factor of an epoch");
    describe_warmup(schema);
  }

  double rate(double lr, const Position& position) const {
    const double whole = std::floor(position.epochs());
    return multiplied(lr, gamma, whole) * std::pow(gamma, position.epochs() - whole);
  }
};

struct CosineOptions : WarmupOptions {
  double min_lr = 0;

  static void describe(config::Schema<CosineOptions>& schema) {
    describe_warmup(schema);
    schema.field("min_lr", &CosineOptions::min_lr, "the rate at the end").between(0, kMaxRate);
  }

  double rate(double lr, const Position& position) const {
    if (position.by_epoch) return by_recursion(lr, position);
    return min_lr + (lr - min_lr) * (1 + std::cos(std::numbers::pi * position.share())) / 2;
  }

 private:
  /// rate() with the bits of torch's CosineAnnealingLR, which derives each epoch's rate from the
  /// one before.
  double by_recursion(double lr, const Position& position) const {
    double before = 2;
    for (double epoch = 1; epoch <= position.at; ++epoch) {
      const double now = 1 + std::cos(std::numbers::pi * epoch / position.length);
      lr = now / before * (lr - min_lr) + min_lr;
      before = now;
    }
    return lr;
  }
};

struct PolyOptions : WarmupOptions {
  double power = 1;

  static void describe(config::Schema<PolyOptions>& schema) {
    constexpr double kMaxPower = 100;
    schema.field("power", &PolyOptions::power, "exponent of the share that is left")
        .positive_up_to(kMaxPower);
    describe_warmup(schema);
  }

  double rate(double lr, const Position& position) const {
    return lr * std::pow(1 - position.share(), power);
  }
};

template <class Options>
void add(ScheduleKind::Registry& registry, const std::string& type, const std::string& help) {
  registry.add<Options>(type, help, [](const Options& options, const ScheduleArgs& args) {
    return std::make_unique<WarmupSchedule>(
        options, args,
        [options, lr = args.lr](const Position& position) { return options.rate(lr, position); });
  });
}

}  // namespace

ScheduleKind::Registry& ScheduleKind::registry() {
  static Registry registry = [] {
    Registry made("schedule");
    add<ConstantOptions>(made, "constant", "the optimizer's lr in all steps");
    add<StepOptions>(made, "step", "multiplied by gamma every step_size epochs");
    add<MultistepOptions>(made, "multistep", "multiplied by gamma at each milestone");
    add<ExponentialOptions>(made, "exponential", "falls step by step, by gamma in an epoch");
    add<CosineOptions>(made, "cosine", "falls along a cosine, step by step, to min_lr");
    add<PolyOptions>(made, "poly",
                     "falls step by step to 0: a power of the share of steps that is left");
    add_onecycle(made);
    add_plateau(made);
    return made;
  }();
  return registry;
}

}  // namespace syncbn::train
