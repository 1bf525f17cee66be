#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include <syncbn/config/duration.h>
#include <syncbn/train/schedule.h>

#include "optimizers/common_options.h"

namespace syncbn::train {

constexpr double kMaxFactor = 1000;  ///< anything above is a typo

/// The options of schedules that can rise at the start.
struct WarmupOptions {
  config::EpochsOrSteps warmup;
  std::optional<double> warmup_start;
  bool by_epoch = false;
};

template <class Options>
void describe_warmup(config::Schema<Options>& schema) {
  schema
      .field("warmup", &Options::warmup,
             "length of the linear rise at the start: 5, 0.5ep, 2000step")
      .between(0, kMaxEpochs)
      .unit("epochs");
  schema
      .field("warmup_start", &Options::warmup_start,
             "factor of the rate that the first step has; null: 1 / steps of the rise")
      .positive_up_to(1);
  schema.field("by_epoch", &Options::by_epoch, "change the rate once an epoch, not in each step");
}

/// Where a step is in the part of a run after the warm-up. Unit: steps, or epochs with by_epoch.
struct Position {
  double at = 0;      ///< from 0
  double length = 0;  ///< of this part; may be 0
  double epoch = 1;   ///< length of an epoch
  bool by_epoch = false;

  /// From 0 at the start to 1 at the end.
  double share() const {
    if (at == 0) return 0;
    return at < length ? at / length : 1;
  }
  double epochs() const { return at / epoch; }
};

/// A warm-up, then a rate that depends on the position. With by_epoch, the rates have the bits of
/// torch's schedulers, and after a warm-up those of SequentialLR(LinearLR, ...); a cosine with both
/// min_lr and a warm-up differs in the last bit. Not thread-safe.
class WarmupSchedule : public Schedule {
 public:
  using Rate = std::function<double(const Position&)>;

  /// @param rate the rate after the warm-up, which rises to the rate at position 0
  WarmupSchedule(const WarmupOptions& options, const ScheduleArgs& args, Rate rate);

  double lr(int64_t step) const override;
  double warmup_steps() const override;

 private:
  /// The position `at` after the end of the warm-up.
  Position position(double at) const;
  /// The rate at `at` steps or epochs in a warm-up from `start` * `full` to `full`.
  double rising(double full, double start, double at) const;

  WarmupOptions options_;
  int64_t steps_per_epoch_;
  double epoch_;   ///< length of an epoch
  double warmup_;  ///< length of the warm-up
  double total_;   ///< length of the run
  Rate rate_;
};

}  // namespace syncbn::train
