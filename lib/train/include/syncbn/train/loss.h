#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>

namespace syncbn::train {

/// What a task tells its loss.
struct LossArgs {
  int64_t num_classes = 0;
  std::vector<double> class_weights = {};  ///< task.class_weights; empty: all 1
  double label_smoothing = 0;              ///< task.label_smoothing
  /// The label of pixels that do not count. Empty: there is one label for each image.
  std::optional<int64_t> ignored_label = std::nullopt;
};

/// The loss of the tasks classification and segmentation.
///
/// `logits` are [B, C], or [B, C, H, W] in segmentation. `target` is int64, [B] or [B, H, W], or,
/// of images that MixUp or CutMix has mixed, the share of each class, [B, C]. Not thread-safe.
class Loss {
 public:
  virtual ~Loss() = default;

  /// The loss to train on: the mean over the samples or pixels, a scalar with a graph. May not wait
  /// for the device.
  virtual at::Tensor mean(const at::Tensor& logits, const at::Tensor& target) const = 0;

  /// The loss of each sample or pixel, to report in evaluation: without regularisation such as
  /// label smoothing. [B] or [B, H, W], 0 for ignored pixels.
  virtual at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const = 0;

  /// The probability of each class, in the shape of the logits; by default their softmax.
  virtual at::Tensor probabilities(const at::Tensor& logits) const;
};

/// The registry behind `task: {loss: {type: cross_entropy}}`. Knows cross_entropy, and bce for
/// classification. make() throws base::UserError for arguments that do not suit the loss: one that
/// knows no class weights or no label smoothing refuses them.
struct LossKind {
  using Registry = config::Registry<std::unique_ptr<Loss>, const LossArgs&>;
  static Registry& registry();
};

}  // namespace syncbn::train
