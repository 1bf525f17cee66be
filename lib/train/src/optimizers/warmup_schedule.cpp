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
  if (at >= warmup_) return rate_(position(at - warmup_));
  const double full = rate_(position(0));
  if (const auto start = options_.warmup_start) return rising(full, *start, at);
  // + 1: the first step must have a rate above 0.
  return full * std::min((at + 1) / std::max(warmup_, 1.0), 1.0);
}

double WarmupSchedule::warmup_steps() const {
  return options_.warmup.epochs(steps_per_epoch_) * static_cast<double>(steps_per_epoch_);
}

Position WarmupSchedule::position(double at) const {
  return {.at = at, .length = total_ - warmup_, .epoch = epoch_, .by_epoch = options_.by_epoch};
}

double WarmupSchedule::rising(double full, double start, double at) const {
  const double rise = 1 - start;
  if (!options_.by_epoch) return full * (start + rise * at / warmup_);
  // Like torch's LinearLR, with the same bits.
  double lr = full * start;
  for (double epoch = 1; epoch <= at; ++epoch) {
    lr *= 1 + rise / (warmup_ * start + (epoch - 1) * rise);
  }
  return lr;
}

}  // namespace syncbn::train
