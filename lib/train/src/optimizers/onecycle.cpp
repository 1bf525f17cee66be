#include <algorithm>
#include <cmath>
#include <numbers>

#include "optimizers/kinds.h"
#include "optimizers/warmup_schedule.h"

namespace syncbn::train {
namespace {

struct OnecycleOptions {
  double max_factor = 1;
  double pct_start = 0.3;
  std::string anneal_strategy = "cos";
  double div_factor = 25;
  double final_div_factor = 1e4;
  bool three_phase = false;

  static void describe(config::Schema<OnecycleOptions>& schema) {
    constexpr double kMaxDivisor = 1e12;
    schema.field("max_factor", &OnecycleOptions::max_factor, "highest rate / the optimizer's lr")
        .positive_up_to(kMaxFactor);
    schema.field("pct_start", &OnecycleOptions::pct_start, "share of all steps in which it rises")
        .between(0, 1);
    schema.field("anneal_strategy", &OnecycleOptions::anneal_strategy, "shape of rise and fall")
        .one_of({"cos", "linear"});
    schema.field("div_factor", &OnecycleOptions::div_factor, "highest rate / first rate")
        .positive_up_to(kMaxDivisor);
    schema.field("final_div_factor", &OnecycleOptions::final_div_factor, "first rate / last rate")
        .positive_up_to(kMaxDivisor);
    schema.field("three_phase", &OnecycleOptions::three_phase,
                 "fall to the first rate as long as it rose, and to the last one after that");
  }
};

/// torch.optim.lr_scheduler.OneCycleLR (Smith and Topin, arXiv:1708.07120) without momentum.
class Onecycle : public Schedule {
 public:
  Onecycle(const OnecycleOptions& options, const ScheduleArgs& args)
      : is_linear_(options.anneal_strategy == "linear") {
    const auto steps = static_cast<double>(args.epochs * args.steps_per_epoch);
    const double highest = args.lr * options.max_factor;
    const double first = highest / options.div_factor;
    const double last = first / options.final_div_factor;
    const double rise = options.pct_start * steps - 1;
    phases_.push_back({rise, first, highest});
    if (options.three_phase) phases_.push_back({2 * options.pct_start * steps - 2, highest, first});
    phases_.push_back({steps - 1, phases_.back().to, last});
  }

  double lr(int64_t step) const override {
    const auto at = static_cast<double>(step);
    double begin = 0;
    for (const Phase& phase : phases_) {
      if (at <= phase.end || &phase == &phases_.back()) return between(phase, begin, at);
      begin = phase.end;
    }
    return phases_.back().to;
  }

 private:
  struct Phase {
    double end;  ///< its last step
    double from;
    double to;
  };

  double between(const Phase& phase, double begin, double at) const {
    // In a run of few steps a phase may be empty.
    const double share =
        phase.end > begin ? std::min((at - begin) / (phase.end - begin), 1.0) : 1.0;
    if (is_linear_) return (phase.to - phase.from) * share + phase.from;
    return phase.to + (phase.from - phase.to) / 2 * (std::cos(std::numbers::pi * share) + 1);
  }

  bool is_linear_;
  std::vector<Phase> phases_;
};

}  // namespace

void add_onecycle(ScheduleKind::Registry& registry) {
  registry.add<OnecycleOptions>("onecycle",
                                "rises and falls once, step by step, as torch's OneCycleLR",
                                [](const OnecycleOptions& options, const ScheduleArgs& args) {
                                  return std::make_unique<Onecycle>(options, args);
                                });
}

}  // namespace syncbn::train
