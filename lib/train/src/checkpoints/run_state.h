#pragma once

#include <string>

#include <c10/core/Device.h>

#include <syncbn/data/loader.h>
#include <syncbn/models/model.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/config.h>
#include <syncbn/train/optimizer.h>

#include "step/training_step.h"

namespace syncbn::train {

/// Everything in a run that changes from step to step, except its position. Not thread-safe.
class RunState {
 public:
  /// The arguments must outlive it.
  RunState(const Config& config, models::Model& model, TrainingStep& step, data::Loader& loader,
           Schedule& schedule)
      : config_(config), model_(model), step_(step), loader_(loader), schedule_(schedule) {}

  /// Restores everything to what it was when the checkpoint was saved: bit for bit on as many ranks
  /// with the same type of device.
  /// @param name of the checkpoint
  /// @return the position: the checkpoint without its tensors
  /// @throws base::UserError when it does not fit; its message calls the checkpoint "it"
  Checkpoint restore(Checkpoint checkpoint, const std::string& name);

  /// Adds the state to a position. Every rank calls it and contributes its random numbers; on all
  /// ranks, the network is rank 0's.
  Checkpoint add_to(Checkpoint position) const;

 private:
  void restore_random_numbers(const at::Tensor& state, const std::string& name) const;

  const Config& config_;
  models::Model& model_;
  TrainingStep& step_;
  data::Loader& loader_;
  Schedule& schedule_;
};

}  // namespace syncbn::train
