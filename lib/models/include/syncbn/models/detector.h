#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// The boxes found in one image, highest score first.
struct Detections {
  at::Tensor boxes;   ///< [n, 4]: x1, y1, x2, y2 in pixels, within the image
  at::Tensor scores;  ///< [n], between 0 and 1
  at::Tensor labels;  ///< [n], int64, from 0
};

/// A network that finds boxes. forward() takes images that are normalised and padded with zeros to
/// the size of the largest, a multiple of 32. It returns logits of the classes of each anchor:
/// [N, A, num_classes]. forward_all() returns the inputs of loss() and detect(), both in training
/// and in evaluation mode.
class Detector : public Model {
 public:
  /// The loss of this rank's images, a scalar: the sum of torchvision's losses.
  /// @param outputs of forward_all()
  /// @param target float64 [N, 1 + M, 5]. Row 0 of an image is {index, original height, original
  ///   width, height, width}, the others are {label, x1, y1, x2, y2} in pixels; a box has a
  ///   positive width and height. Label -1: no box.
  virtual at::Tensor loss(const std::vector<at::Tensor>& outputs,
                          const at::Tensor& target) const = 0;

  /// Finds the boxes in each image, without gradients. Waits for the device.
  /// @param outputs of forward_all()
  /// @param sizes [N, 2]: height and width of each image within the padding, in pixels
  virtual std::vector<Detections> detect(const std::vector<at::Tensor>& outputs,
                                         const at::Tensor& sizes) const = 0;
};

}  // namespace syncbn::models
