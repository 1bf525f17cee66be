#pragma once

#include <memory>

#include <syncbn/models/model.h>

namespace syncbn::models {

struct ResNetOptions {
  /// A 3x3 stem of stride 1 without max pooling, for images of about 32 x 32 (CIFAR).
  bool small_input = false;
  /// Start each residual branch at zero (its last batch norm's weight), as Goyal et al.,
  /// arXiv:1706.02677, do.
  bool zero_init_residual = false;

  static void describe(config::Schema<ResNetOptions>& schema);
};

/// ResNet (He et al., arXiv:1512.03385), with stride in the 3x3 convolution of a bottleneck.
/// Names, order and shapes of parameters and buffers, and the initialisation, are those of
/// torchvision's resnet18 and resnet50, so that weights go both ways.
std::shared_ptr<Model> resnet18(const ModelArgs& args = {}, const ResNetOptions& options = {});
std::shared_ptr<Model> resnet50(const ModelArgs& args = {}, const ResNetOptions& options = {});

}  // namespace syncbn::models
