#pragma once

#include <memory>

#include <syncbn/models/model.h>

namespace syncbn::models {

struct ResNetOptions {
  /// A 3x3 stem of stride 1 without max pooling, for images of about 32 x 32 (CIFAR).
  bool small_input = false;
  /// Initialise the weight of each block's last batch norm to zero (Goyal et al.,
  /// arXiv:1706.02677).
  bool zero_init_residual = false;
  /// Probability that training drops an input of the last layer.
  double dropout = 0;
  /// Probability that a sample skips the last block in training (NormRelu); rises linearly from 0
  /// in the first block, like timm's drop_path_rate.
  double stochastic_depth = 0;

  static void describe(config::Schema<ResNetOptions>& schema);
};

/// ResNet (He et al., arXiv:1512.03385), with the stride in the 3x3 convolution of a bottleneck.
/// Names, order, shapes and initial values of parameters and buffers are those of torchvision's
/// resnet18 and resnet50, so that each can load the other's weights.
std::shared_ptr<Model> resnet18(const ModelArgs& args = {}, const ResNetOptions& options = {});
std::shared_ptr<Model> resnet50(const ModelArgs& args = {}, const ResNetOptions& options = {});

}  // namespace syncbn::models
