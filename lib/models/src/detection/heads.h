#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../blocks.h"

namespace syncbn::models {

/// Predicts classes and boxes of all anchors: two stacks of convolutions that all levels share.
class DenseHead : public torch::nn::Module {
 public:
  /// @param anchors at each place
  /// @param head_norm normalisation of the four convolutions before the last: none, group (32
  ///   groups) or batch (the batch norm of ModelArgs). Levels share the layers, but each level has
  ///   its own batch statistics.
  /// @param centerness adds FCOS's centerness, clips box regressions at 0, and gives layers FCOS's
  ///   names instead of RetinaNet's
  DenseHead(const ModelArgs& args, int64_t anchors, const std::string& head_norm, bool centerness);

  /// @param levels of the feature pyramid, [N, 256, h, w]
  /// @return of the anchors of all levels: logits [N, A, classes], box regression [N, A, 4] and, if
  ///   there is one, centerness [N, A, 1]
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& levels);

 private:
  int64_t classes_;
  std::shared_ptr<Chain> class_tower_;
  torch::nn::Conv2d class_logits_{nullptr};
  std::shared_ptr<Chain> box_tower_;
  torch::nn::Conv2d box_regression_{nullptr};
  torch::nn::Conv2d centerness_{nullptr};
};

}  // namespace syncbn::models
