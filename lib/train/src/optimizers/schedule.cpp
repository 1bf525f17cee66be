#include <syncbn/train/schedule.h>

#include <syncbn/config/schema.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <utility>

#include "optimizers/parameter_groups.h"

namespace syncbn::train {
namespace {

constexpr double kMaxFactor = 1000;  // more is a typing error

/// Options of every schedule but onecycle, which has a rise of its own.
struct WarmupOptions {
  double warmup = 0;
  std::optional<double> warmup_start;
  bool by_epoch = false;

  template <class Options>
  static void describe(config::Schema<Options>& schema) {
    schema
        .field(
            "warmup", &Options::warmup,
            "length of the linear rise at the start; the schedule's own epochs count from its end")
        .between(0, kMaxEpochs)
        .unit("epochs");
    schema
        .field("warmup_start", &Options::warmup_start,
               "factor of lr in the first step; null: one step's share of the rise")
        .above(0)
        .at_most(1);
    schema.field(
        "by_epoch", &Options::by_epoch,
        "change the rate once an epoch, as torchvision's reference does, not in each step");
  }
};

/// Where a run is after its warm-up, in epochs.
struct Place {
  double at = 0;
  double total = 1;
  /// In [0, 1].
  double share() const { return total > 0 ? std::min(at / total, 1.0) : 1; }
};

using Curve = std::function<double(const Place&)>;

/// A warm-up, then a curve.
class CurveSchedule : public Schedule {
 public:
  CurveSchedule(WarmupOptions warmup, const ScheduleArgs& args, Curve curve)
      : warmup_(std::move(warmup)), args_(args), curve_(std::move(curve)) {}

  double lr(int64_t step) const override {
    const double in_unit = warmup_.by_epoch ? 1 : static_cast<double>(args_.steps_per_epoch);
    const double total = static_cast<double>(args_.epochs) * in_unit;
    const double rise = std::min(warmup_.warmup * in_unit, total);
    const auto at = static_cast<double>(warmup_.by_epoch ? step / args_.steps_per_epoch : step);
    if (at < rise) return args_.lr * rising(at, rise);
    return curve_({.at = (at - rise) / in_unit, .total = (total - rise) / in_unit});
  }

 private:
  double rising(double at, double rise) const {
    // + 1, so that the first step has a rate above 0.
    if (!warmup_.warmup_start) return (at + 1) / std::max(rise, 1.0);
    return *warmup_.warmup_start + (1 - *warmup_.warmup_start) * at / rise;
  }

  WarmupOptions warmup_;
  ScheduleArgs args_;
  Curve curve_;
};

struct ConstantOptions : WarmupOptions {
  static void describe(config::Schema<ConstantOptions>& schema) { WarmupOptions::describe(schema); }
};

struct StepOptions : WarmupOptions {
  int64_t step_size = 30;
  double gamma = 0.1;

  static void describe(config::Schema<StepOptions>& schema) {
    schema.field("step_size", &StepOptions::step_size, "epochs between two changes")
        .between(1, kMaxEpochs)
        .unit("epochs");
    schema.field("gamma", &StepOptions::gamma, "factor of each change")
        .above(0)
        .at_most(kMaxFactor);
    WarmupOptions::describe(schema);
  }
};

struct MultistepOptions : WarmupOptions {
  std::vector<int64_t> milestones;
  double gamma = 0.1;

  static void describe(config::Schema<MultistepOptions>& schema) {
    schema.field("milestones", &MultistepOptions::milestones, "epochs after which the rate changes")
        .required()
        .between(1, kMaxEpochs);
    schema.field("gamma", &MultistepOptions::gamma, "factor of each change")
        .above(0)
        .at_most(kMaxFactor);
    WarmupOptions::describe(schema);
  }
};

struct ExponentialOptions : WarmupOptions {
  double gamma = 0.95;

  static void describe(config::Schema<ExponentialOptions>& schema) {
    schema.field("gamma", &ExponentialOptions::gamma, "factor of each epoch")
        .above(0)
        .at_most(kMaxFactor);
    WarmupOptions::describe(schema);
  }
};

struct CosineOptions : WarmupOptions {
  double min_lr = 0;

  static void describe(config::Schema<CosineOptions>& schema) {
    schema.field("min_lr", &CosineOptions::min_lr, "the rate at the end").between(0, kMaxRate);
    WarmupOptions::describe(schema);
  }
};

struct PolyOptions : WarmupOptions {
  double power = 0.9;

  static void describe(config::Schema<PolyOptions>& schema) {
    schema.field("power", &PolyOptions::power, "power of what is left of the run")
        .above(0)
        .at_most(kMaxFactor);
    WarmupOptions::describe(schema);
  }
};

struct OnecycleOptions {
  double pct_start = 0.3;
  double div_factor = 25;
  double final_div_factor = 1e4;

  static void describe(config::Schema<OnecycleOptions>& schema) {
    schema
        .field("pct_start", &OnecycleOptions::pct_start, "share of the run in which the rate rises")
        .above(0)
        .below(1);
    schema.field("div_factor", &OnecycleOptions::div_factor, "lr over the first rate").at_least(1);
    schema
        .field("final_div_factor", &OnecycleOptions::final_div_factor,
               "the first rate over the last")
        .at_least(1);
  }
};

/// torch.optim.lr_scheduler.OneCycleLR with anneal_strategy cos (Smith and Topin,
/// arXiv:1708.07120).
class Onecycle : public Schedule {
 public:
  Onecycle(const OnecycleOptions& options, const ScheduleArgs& args)
      : options_(options),
        args_(args),
        last_(static_cast<double>(args.epochs * args.steps_per_epoch) - 1),
        top_(options.pct_start * (last_ + 1) - 1) {}

  double lr(int64_t step) const override {
    const auto at = static_cast<double>(step);
    const double first = args_.lr / options_.div_factor;
    if (at <= top_ || last_ <= top_) return between(first, args_.lr, at / top_);
    return between(args_.lr, first / options_.final_div_factor,
                   std::min((at - top_) / (last_ - top_), 1.0));
  }

 private:
  static double between(double from, double to, double share) {
    return to + (from - to) / 2 * (std::cos(std::numbers::pi * share) + 1);
  }

  OnecycleOptions options_;
  ScheduleArgs args_;
  double last_;  ///< step
  double top_;   ///< the step with the highest rate
};

struct PlateauOptions : WarmupOptions {
  double factor = 0.1;
  int64_t patience = 10;
  double threshold = 1e-4;
  int64_t cooldown = 0;
  double min_lr = 0;

  static void describe(config::Schema<PlateauOptions>& schema) {
    schema.field("factor", &PlateauOptions::factor, "factor of each change").above(0).below(1);
    schema
        .field("patience", &PlateauOptions::patience,
               "evaluations without a lower loss before the rate falls")
        .at_least(0)
        .unit("evaluations");
    schema
        .field("threshold", &PlateauOptions::threshold,
               "the loss must fall by more than this share to count as lower")
        .at_least(0)
        .below(1);
    schema
        .field("cooldown", &PlateauOptions::cooldown,
               "evaluations after a change that do not count")
        .at_least(0)
        .unit("evaluations");
    schema.field("min_lr", &PlateauOptions::min_lr, "the lowest rate").between(0, kMaxRate);
    WarmupOptions::describe(schema);
  }
};

/// torch.optim.lr_scheduler.ReduceLROnPlateau.
class Plateau : public Schedule {
 public:
  Plateau(const PlateauOptions& options, const ScheduleArgs& args)
      : options_(options), curve_(options, args, [this, args](const Place&) {
          return std::max(args.lr * factor_, std::min(options_.min_lr, args.lr));
        }) {}

  double lr(int64_t step) const override { return curve_.lr(step); }

  void observe(double loss) override {
    if (loss < best_ * (1 - options_.threshold)) {
      best_ = loss;
      bad_ = 0;
    } else {
      ++bad_;
    }
    if (cooldown_ > 0) {
      --cooldown_;
      bad_ = 0;
    }
    if (bad_ <= static_cast<double>(options_.patience)) return;
    factor_ *= options_.factor;
    cooldown_ = static_cast<double>(options_.cooldown);
    bad_ = 0;
  }

  std::map<std::string, double> state() const override {
    return {{"factor", factor_}, {"best", best_}, {"bad", bad_}, {"cooldown", cooldown_}};
  }
  void load(const std::map<std::string, double>& state) override {
    const auto restore = [&](const char* name, double& value) {
      if (const auto found = state.find(name); found != state.end()) value = found->second;
    };
    restore("factor", factor_);
    restore("best", best_);
    restore("bad", bad_);
    restore("cooldown", cooldown_);
  }

 private:
  PlateauOptions options_;
  double factor_ = 1;
  double best_ = std::numeric_limits<double>::infinity();
  double bad_ = 0;       ///< evaluations since the best
  double cooldown_ = 0;  ///< evaluations that will not count
  CurveSchedule curve_;
};

/// Registers a schedule whose `curve` is a function of the options, the rate and the place.
template <class Options, class Function>
void add(ScheduleKind::Registry& registry, const char* type, const char* help, Function curve) {
  registry.add<Options>(type, help, [curve](const Options& options, const ScheduleArgs& args) {
    return std::make_unique<CurveSchedule>(
        options, args, [=](const Place& place) { return curve(options, args.lr, place); });
  });
}

}  // namespace

ScheduleKind::Registry& ScheduleKind::registry() {
  static Registry registry = [] {
    Registry made;
    add<ConstantOptions>(made, "constant", "the optimizer's lr in all steps",
                         [](const auto&, double lr, const Place&) { return lr; });
    add<StepOptions>(made, "step", "multiplied by gamma every step_size epochs",
                     [](const StepOptions& options, double lr, const Place& place) {
                       const double size = static_cast<double>(options.step_size);
                       return lr * std::pow(options.gamma, std::floor(place.at / size));
                     });
    add<MultistepOptions>(made, "multistep", "multiplied by gamma at each milestone",
                          [](const MultistepOptions& options, double lr, const Place& place) {
                            const auto passed =
                                std::ranges::count_if(options.milestones, [&](int64_t milestone) {
                                  return place.at >= static_cast<double>(milestone);
                                });
                            return lr * std::pow(options.gamma, static_cast<double>(passed));
                          });
    add<ExponentialOptions>(made, "exponential", "multiplied by gamma each epoch",
                            [](const ExponentialOptions& options, double lr, const Place& place) {
                              return lr * std::pow(options.gamma, place.at);
                            });
    add<CosineOptions>(made, "cosine", "falls along a cosine, step by step, to min_lr",
                       [](const CosineOptions& options, double lr, const Place& place) {
                         return options.min_lr +
                                (lr - options.min_lr) *
                                    (1 + std::cos(std::numbers::pi * place.share())) / 2;
                       });
    add<PolyOptions>(made, "poly", "falls to 0 with a power of what is left of the run",
                     [](const PolyOptions& options, double lr, const Place& place) {
                       return lr * std::pow(1 - place.share(), options.power);
                     });
    made.add<OnecycleOptions>("onecycle", "rises from lr / div_factor to lr and falls below it",
                              [](const OnecycleOptions& options, const ScheduleArgs& args) {
                                return std::make_unique<Onecycle>(options, args);
                              });
    made.add<PlateauOptions>("plateau", "falls when the loss of the evaluations falls no more",
                             [](const PlateauOptions& options, const ScheduleArgs& args) {
                               return std::make_unique<Plateau>(options, args);
                             });
    return made;
  }();
  return registry;
}

}  // namespace syncbn::train
