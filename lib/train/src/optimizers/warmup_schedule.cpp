#include "optimizers/warmup_schedule.h"

#include <algorithm>
#include <utility>

namespace syncbn::train {

WarmupSchedule::WarmupSchedule(const WarmupOptions& options, const ScheduleArgs& args, Rate rate)
    : options_(options),
      steps_per_epoch_(args.steps_per_epoch),
      epoch_(options.by_epoch ? 1.0 : static_cast<double>(args.steps_per_epoch)),
      warmup_(
          std::min(options.warmup.epochs(args.steps_per_epoch), static_cast<double>(args.epochs)) *
          epoch_),
      total_(static_cast<double>(args.epochs) * epoch_),
      rate_(std::move(rate)) {}

double WarmupSchedule::lr(int64_t step) const {
  const auto at = static_cast<double>(options_.by_epoch ? step / steps_per_epoch_ : step);
  const double length = total_ - warmup_;
  if (at >= warmup_) return rate_({.at = at - warmup_, .length = length, .epoch = epoch_});
  const double full = rate_({.at = 0, .length = length, .epoch = epoch_});
  if (const auto start = options_.warmup_start)
    return full * (*start + (1 - *start) * at / warmup_);
  // + 1, so that the first step has a rate above 0.
  return full * std::min((at + 1) / std::max(warmup_, 1.0), 1.0);
}

}  // namespace syncbn::train
