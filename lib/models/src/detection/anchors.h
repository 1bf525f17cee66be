#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace syncbn::models {

/// Anchor boxes around each place of each level of a feature pyramid: x1, y1, x2, y2 in pixels of
/// the padded image. They do not depend on the image, and may reach beyond it.
class AnchorGenerator {
 public:
  /// @param scales for each level: square roots of the anchors' areas, in pixels
  /// @param ratios height / width
  AnchorGenerator(const std::vector<std::vector<float>>& scales, const std::vector<float>& ratios);

  /// Number of anchors at one place.
  int64_t per_place() const { return cells_.front().size(0); }
  size_t levels() const { return cells_.size(); }

  /// @param images [N, C, H, W]
  /// @param features of each level, [N, C, h, w]
  /// @return for each level [h * w * per_place(), 4], on the device of the images, in their type or
  ///   float32, whichever is more precise. Not thread-safe.
  std::vector<at::Tensor> operator()(const at::Tensor& images,
                                     const std::vector<at::Tensor>& features);

 private:
  std::vector<at::Tensor> cells_;  ///< for each level the anchors around the origin
};

}  // namespace syncbn::models
