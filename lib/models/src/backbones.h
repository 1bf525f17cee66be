#pragma once

// Classifiers as parts of other networks.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// The layers of a classifier up to its last features.
struct Backbone {
  std::shared_ptr<torch::nn::Module> module;
  /// Features at several depths, the deepest last.
  std::function<std::vector<at::Tensor>(const at::Tensor& images)> features;
};

/// The blocks of a ResNet's four stages.
struct ResNetStages {
  std::array<int, 4> depths;
  bool bottleneck = true;

  /// Channels of each stage's output.
  constexpr std::array<int64_t, 4> channels() const {
    if (bottleneck) return {256, 512, 1024, 2048};
    return {64, 128, 256, 512};
  }
};

inline constexpr ResNetStages kResNet18{.depths = {2, 2, 2, 2}, .bottleneck = false};
inline constexpr ResNetStages kResNet50{.depths = {3, 4, 6, 3}};
inline constexpr ResNetStages kResNet101{.depths = {3, 4, 23, 3}};

/// A ResNet. Features are the outputs of the four stages, at 1/4 to 1/32 of the images' resolution.
/// @param name of the whole network, for messages
/// @param dilated_stages number of last stages with dilation instead of a stride: they keep the
///   resolution
Backbone resnet_backbone(const std::string& name, const ModelArgs& args, const ResNetStages& stages,
                         size_t dilated_stages = 0);

/// MobileNetV3, with dilation instead of its last stride. Features have 40 channels at 1/8 of the
/// images' resolution, and 960 at 1/16.
Backbone dilated_mobilenet_v3_large(const std::string& name, const ModelArgs& args);

}  // namespace syncbn::models
