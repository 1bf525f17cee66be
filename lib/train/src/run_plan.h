#pragma once

#include <cstdint>

#include <syncbn/data/loader.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/config.h>

#include "records/epoch_record.h"

namespace syncbn::train {

/// When a run evaluates, saves and ends. Not thread-safe.
class RunPlan {
 public:
  /// @param position how far the run is; its owner updates it
  RunPlan(const Config& config, const data::Loader& loader, const Checkpoint& position)
      : config_(config), loader_(loader), position_(position) {}

  bool reached_max_steps() const;
  bool stopped_early() const;
  bool is_over() const;

  /// Whether an evaluation follows this epoch's training.
  bool evaluates(int64_t epoch) const { return evaluates_whole(epoch) || reached_max_steps(); }
  /// evaluates() for an epoch that was trained to its end.
  bool evaluates_whole(int64_t epoch) const;
  /// Whether last.pt is due after the last step.
  bool saves() const;
  /// saves() after the last step of an epoch, which may be the run's last.
  bool saves_after_epoch(const data::SamplerState& next) const {
    return next.epoch >= config_.epochs || reached_max_steps() || saves();
  }

  /// The last complete epoch.
  EpochRecord last_epoch() const;
  /// Whether the resumed run ended during the evaluation of its last epoch.
  bool owes_evaluation() const;
  /// owes_evaluation() for a run that max_steps ended in the middle of an epoch.
  bool owes_last_evaluation() const {
    return reached_max_steps() && position_.sampler.consumed > 0;
  }

  /// Batches of the run up to the last one that the loader returned, in this run's batch size. A
  /// run that resumed with another batch size has taken fewer or more steps.
  int64_t batches_done() const;
  bool is_before(const config::EpochsOrSteps& end) const {
    return epochs_done() < end.epochs(loader_.num_batches());
  }
  /// Number of steps that the run will have at its end.
  int64_t total_steps() const { return total_steps_after(batches_done()); }
  int64_t total_steps_after(int64_t batches_done) const;

  /// Where the run continues after this epoch.
  data::SamplerState end_of_epoch() const;

 private:
  double epochs_done() const;

  const Config& config_;
  const data::Loader& loader_;
  const Checkpoint& position_;
};

}  // namespace syncbn::train
