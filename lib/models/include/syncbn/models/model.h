#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
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
  /// @return logits: [N, num_classes]; [N, num_classes, H, W] if labels_pixels(); or a Detector's.
  virtual at::Tensor forward(at::Tensor input) = 0;

  /// The trainer calls this. Returns the result of forward(), in training mode followed by the
  /// logits of auxiliary heads, each of the same shape; or a Detector's outputs. By default only
  /// the result of forward().
  virtual std::vector<at::Tensor> forward_all(at::Tensor input);

  /// Whether there are logits for each pixel (segmentation).
  virtual bool labels_pixels() const { return false; }

  /// For load_state_dict(): the current name of a tensor that is called `name` in an older version,
  /// such as the one that published the weights. Called only for names that the network lacks.
  virtual std::string present_name(const std::string& name) const { return name; }

  /// A network of its own with the same parameters, buffers and modes. Every network of this
  /// library has it, as has every other that cloneable() made. Draws no random numbers. Norm::kSync
  /// layers share statistics in the clone; other layers must be converted again.
  /// @throws base::UserError if layers were added or removed after construction; c10::Error if
  ///   cloneable() did not make the network
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;

 protected:
  friend std::shared_ptr<Model> cloneable(std::function<std::shared_ptr<Model>()> make);
  /// For clone(): makes a network of the same structure, with any values.
  std::function<std::shared_ptr<Model>()> make_another_ = {};
};

/// A network made by make(), whose clone() calls it again.
std::shared_ptr<Model> cloneable(std::function<std::shared_ptr<Model>()> make);

/// The source of batch norm's statistics in training.
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
  /// Norm::kLocal, running statistics are then updated twice per step, as in PyTorch.
  bool activation_checkpointing = false;
};

}  // namespace syncbn::models
