#include <algorithm>
#include <cmath>
#include <limits>

#include "optimizers/kinds.h"
#include "optimizers/warmup_schedule.h"

namespace syncbn::train {
namespace {

struct PlateauOptions : WarmupOptions {
  double factor = 0.1;
  int64_t patience = 10;
  double threshold = 1e-4;
  std::string threshold_mode = "rel";
  int64_t cooldown = 0;
  double min_lr = 0;
  double eps = 1e-8;

  static void describe(config::Schema<PlateauOptions>& schema) {
    schema.field("factor", &PlateauOptions::factor, "factor of each change").above(0).below(1);
    schema
        .field("patience", &PlateauOptions::patience, "evaluations without a better loss to accept")
        .at_least(0)
        .unit("evaluations");
    schema
        .field("threshold", &PlateauOptions::threshold,
               "how much lower a loss must be to be better: share of the best, or with abs itself")
        .between(0, kMaxRate);
    schema.field("threshold_mode", &PlateauOptions::threshold_mode, "what threshold is")
        .one_of({"rel", "abs"});
    schema
        .field("cooldown", &PlateauOptions::cooldown,
               "evaluations after a change that do not count as without a better loss")
        .at_least(0)
        .unit("evaluations");
    schema.field("min_lr", &PlateauOptions::min_lr, "the lowest rate").between(0, kMaxRate);
    schema.field("eps", &PlateauOptions::eps, "smallest change of the rate").between(0, kMaxRate);
    describe_warmup(schema);
  }
};

/// torch.optim.lr_scheduler.ReduceLROnPlateau in its mode min.
class Plateau : public WarmupSchedule {
 public:
  Plateau(const PlateauOptions& options, const ScheduleArgs& args)
      : WarmupSchedule(options, args, [this](const Position&) { return lr_; }),
        options_(options),
        base_lr_(args.lr),
        lr_(args.lr) {}

  void observe(double loss) override {
    if (is_better(loss)) {
      best_ = loss;
      bad_evaluations_ = 0;
    } else {
      ++bad_evaluations_;
    }
    if (cooldown_ > 0) {
      --cooldown_;
      bad_evaluations_ = 0;
    }
    if (bad_evaluations_ <= options_.patience) return;
    reduce();
    cooldown_ = options_.cooldown;
    bad_evaluations_ = 0;
  }

  std::map<std::string, double> state() const override {
    std::map<std::string, double> state = {
        {"lr", lr_},
        {"base_lr", base_lr_},
        {"bad_evaluations", static_cast<double>(bad_evaluations_)},
        {"cooldown", static_cast<double>(cooldown_)}};
    if (std::isfinite(best_)) state["best"] = best_;
    return state;
  }

  void load(const std::map<std::string, double>& state) override {
    const auto get = [&](const char* key, double otherwise) {
      const auto found = state.find(key);
      return found == state.end() ? otherwise : found->second;
    };
    // The optimizer's rate may have changed since the checkpoint was saved.
    const double former = get("base_lr", base_lr_);
    lr_ = former > 0 ? get("lr", base_lr_) * (base_lr_ / former) : base_lr_;
    bad_evaluations_ = static_cast<int64_t>(get("bad_evaluations", 0));
    cooldown_ = static_cast<int64_t>(get("cooldown", 0));
    best_ = get("best", kNone);
  }

 private:
  static constexpr double kNone = std::numeric_limits<double>::infinity();

  bool is_better(double loss) const {
    const bool is_relative = options_.threshold_mode == "rel";
    return loss < (is_relative ? best_ * (1 - options_.threshold) : best_ - options_.threshold);
  }

  void reduce() {
    const double next = std::max(lr_ * options_.factor, options_.min_lr);
    if (lr_ - next > options_.eps) lr_ = next;
  }

  PlateauOptions options_;
  double base_lr_;
  double lr_;
  double best_ = kNone;
  int64_t bad_evaluations_ = 0;
  int64_t cooldown_ = 0;
};

}  // namespace

void add_plateau(ScheduleKind::Registry& registry) {
  registry.add<PlateauOptions>("plateau",
                               "multiplied by factor when evaluations find no better loss",
                               [](const PlateauOptions& options, const ScheduleArgs& args) {
                                 return std::make_unique<Plateau>(options, args);
                               });
}

}  // namespace syncbn::train
