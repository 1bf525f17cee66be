#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <syncbn/config/schema.h>
#include <syncbn/dist/process_group_ptr.h>
#include <syncbn/models/model_kind.h>

namespace syncbn::models {

/// A network for DistributedDataParallel<Model>.
class Model : public torch::nn::Module {
 public:
  /// @param input [N, ...sample_shape], float32: [N, C, H, W] for images.
  /// @return logits: [N, num_classes], or [N, num_classes, H, W] if labels_pixels(), or as Detector
  ///   has it.
  virtual at::Tensor forward(at::Tensor input) = 0;

  /// What the trainer calls: the result of forward() and, in training mode, behind it the logits of
  /// auxiliary heads, each of the same shape; a Detector's outputs. By default forward() alone.
  virtual std::vector<at::Tensor> forward_all(at::Tensor input);

  /// Whether the logits are of the classes of each pixel, for segmentation.
  virtual bool labels_pixels() const { return false; }

  /// For load_state_dict(): what the tensor is called that had another name in an older version,
  /// such as the one that published the weights. Asked only for names that the network lacks.
  virtual std::string present_name(const std::string& name) const { return name; }
};

/// Where batch norm takes its statistics from in training.
enum class Norm {
  kLocal,  ///< this rank's batch: torch::nn::BatchNorm2d
  kSync,   ///< the batches of all ranks: dist::SyncBatchNorm
};

struct ModelArgs {
  int64_t num_classes = 1000;
  std::vector<int64_t> sample_shape = {3, 224, 224};  ///< Dataset::sample_shape()
  Norm norm = Norm::kLocal;
  /// For Norm::kSync: the ranks that share statistics. Empty: all.
  dist::GroupOrDefault norm_group = {};
  /// For Norm::kSync: timeout of an exchange. Empty: the group's.
  std::optional<std::chrono::milliseconds> norm_timeout = std::nullopt;
  /// Recompute the inside of each block in the backward pass (dist::checkpoint()). With
  /// Norm::kLocal, running statistics are then updated twice a step, as in PyTorch.
  bool activation_checkpointing = false;
};

}  // namespace syncbn::models
