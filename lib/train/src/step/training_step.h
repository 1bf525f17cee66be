#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <syncbn/data/random.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/models/model.h>
#include <syncbn/train/config.h>
#include <syncbn/train/optimizer.h>
#include <syncbn/train/task.h>

#include "records/step_time.h"
#include "step/ema.h"
#include "step/gradients.h"
#include "step/model.h"
#include "step/stopping.h"

namespace syncbn::train {

/// The type of convolutions and matrix products: that of the key `amp`; with auto, bf16 on GPUs
/// that support it.
at::ScalarType chosen_precision(const Config& config, at::Device device);

/// Runs the network in mixed precision while it lives, if the configuration asks for it.
class Autocast {
 public:
  Autocast(const Config& config, at::Device device);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const at::DeviceType device_;
  const bool was_enabled_;
  const at::ScalarType former_type_;
};

/// A network's outputs; those in 16 bits, from mixed precision, become float32, which losses need.
Task::Outputs full_precision(Task::Outputs outputs);

/// Whether an error of a network says that batch norm has one value per channel, and so no variance
/// to train with. SyncBatchNorm throws it on all ranks, libtorch's layers on one.
bool is_of_one_value(const std::exception& error);

/// Whether a batch that lost samples (loader.on_error: skip) counts as an empty one because of this
/// error, except that the layers before the failing one keep its statistics. Alike on all ranks
/// that exchange statistics.
bool became_too_small(const Config& config, const std::exception& error);

/// One step of training: forward, backward and update. Not thread-safe.
class TrainingStep {
 public:
  /// @param replicas around the model; null: the rank has one device
  TrainingStep(const Config& config, const Task& task, const BatchToDevice& to_device,
               std::shared_ptr<models::Model> model, std::shared_ptr<Replicas> replicas = nullptr);

  /// Trains on this rank's batch, which may be empty, or as small as became_too_small() says. Every
  /// rank calls it. Does not wait for the device to finish.
  /// @param random of this batch and rank
  /// @return the vote of the step before, if it was not taken yet. If a loss was not finite in that
  ///   step and the run does not skip such steps, this step has changed no parameter: the run must
  ///   not continue from here.
  std::optional<StepVote::Result> run(const data::Batch& batch, double lr,
                                      data::SampleRandom& random, const Wishes& wishes);

  /// Waits for the vote of the last step and returns it.
  std::optional<StepVote::Result> finish() { return vote_.take(); }

  /// Whether the run goes on after a step with this result.
  bool accepts(const StepVote::Result& result) const {
    return is_good(result) || config_.on_nan == "skip";
  }
  /// Whether losses and gradients were finite. A scaler expects gradients to overflow at times.
  bool is_good(const StepVote::Result& result) const {
    return result.is_finite() && (scaler_ || !result.overflowed);
  }

  /// Call this after each step that is part of the run.
  /// @param step steps of the run so far, this one included
  void update_average(int64_t step, bool copies);

  /// The times of this rank's passes since the last call, without `whole` and `data`. How much of
  /// the exchange of gradients backward hides is what c10d's Reducer measures in some steps. On
  /// GPUs, whose work the host does not see, it measures all times.
  StepTime take_times(int64_t steps);

  /// Prepares the network for training.
  void train() { set_training(config_, *model_); }

  /// This rank's counts (Task::counts()) since the last call: [K], int64.
  at::Tensor take_counts();

  Optimizer& optimizer() { return *optimizer_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  Ema* ema() { return ema_.get(); }               ///< null: none
  GradScaler* scaler() { return scaler_.get(); }  ///< null: none

 private:
  /// The parameters that a turn of the step trains.
  struct Turn {
    Turn(const Config& config, const std::shared_ptr<models::Model>& model,
         const std::string& prefix);

    Tensors parameters;
    Tensors others;  ///< trainable parameters of other turns
    dist::DistributedDataParallel<models::Model> ddp;
  };

  /// Unscales the gradients of a backward, sets `found_inf` to 1 if one is not finite, and clips
  /// them.
  void prepare_gradients(const Turn& turn, at::Tensor& found_inf) const;
  /// Adds the gradients of a batch; returns its mean loss.
  at::Tensor backward(size_t turn, const data::Batch& batch);
  at::Tensor backward_part(size_t turn, data::Batch batch, double share);
  /// `batch` becomes empty where it became_too_small().
  Task::Outputs forward_or_empty(models::Model& model, size_t turn, data::Batch& batch);
  Task::Outputs forward(models::Model& model, size_t turn, const data::Batch& batch) const;
  Tensors undone_by_skip() const;
  void save_former();
  void restore_former(const at::Tensor& is_bad);

  const Config& config_;
  const Task& task_;
  const BatchToDevice& to_device_;
  const std::shared_ptr<models::Model> model_;
  const std::shared_ptr<Replicas> replicas_;  ///< null: the rank has one device
  const at::Device device_;
  const std::unique_ptr<Optimizer> optimizer_;  ///< of all turns
  std::vector<std::unique_ptr<Turn>> turns_;
  const std::unique_ptr<GradScaler> scaler_;
  const std::unique_ptr<Ema> ema_;
  StepVote vote_;
  Tensors former_;  ///< values of undone_by_skip() before the step
  at::Tensor counts_;
  int64_t trained_ = 0;  ///< samples of this step that the network was trained on
  bool has_warned_ = false;
  LapTimer timer_;
  StepTime times_;  ///< sums since the last take_times()
};

}  // namespace syncbn::train
