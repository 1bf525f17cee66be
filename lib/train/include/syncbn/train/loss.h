#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>

namespace syncbn::train {

/// What a task passes to its loss.
struct LossArgs {
  int64_t num_classes = 0;
  std::vector<double> class_weights = {};  ///< task.class_weights; empty: all 1
  double label_smoothing = 0;              ///< task.label_smoothing
  /// The label of pixels that do not count. Empty: each image has one label.
  std::optional<int64_t> ignored_label = std::nullopt;
};

/// The loss of the tasks classification and segmentation.
///
/// `logits` are [B, C], or [B, C, H, W] in segmentation. `target` is int64, [B] or [B, H, W]; for
/// images that MixUp or CutMix has mixed, it is the share of each class, [B, C]. Not thread-safe.
class Loss {
 public:
  virtual ~Loss() = default;

  /// The loss to train on: the mean over the samples or pixels, a scalar with a graph. Must not
  /// wait for the device.
  virtual at::Tensor mean(const at::Tensor& logits, const at::Tensor& target) const = 0;

  /// The loss of each sample or pixel, for evaluation: without regularisation such as label
  /// smoothing. [B] or [B, H, W], 0 for ignored pixels.
  virtual at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const = 0;

  /// The probability of each class, in the shape of the logits; by default their softmax.
  virtual at::Tensor probabilities(const at::Tensor& logits) const;
};

/// The registry behind `task: {loss: {type: cross_entropy}}`. Contains cross_entropy and, for
/// classification, bce. make() throws base::UserError for arguments that the loss does not support,
/// such as class weights or label smoothing.
struct LossKind {
  using Registry = config::Registry<std::unique_ptr<Loss>, const LossArgs&>;
  static Registry& registry();
};

}  // namespace syncbn::train
