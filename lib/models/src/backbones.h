#pragma once

// Classifiers as parts of other networks.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// The layers of a classifier up to its last features.
struct Backbone {
  std::shared_ptr<torch::nn::Module> module;
  /// Features at several depths, the last ones at the end.
  std::function<std::vector<at::Tensor>(const at::Tensor& images)> features;
};

/// A ResNet of bottlenecks. Features are the outputs of the four stages: 256, 512, 1024 and 2048
/// channels, at 1/4 to 1/32 of the images' resolution.
/// @param name of the whole network, for messages
/// @param depths blocks of each stage
/// @param dilated_stages at the end that keep the resolution and have dilation in place of a stride
Backbone resnet_backbone(const std::string& name, const ModelArgs& args,
                         const std::vector<int>& depths, size_t dilated_stages = 0);

/// MobileNetV3, with dilation in place of its last stride. Features are of 40 channels at an eighth
/// of the resolution, and of 960 at a sixteenth.
Backbone dilated_mobilenet_v3_large(const std::string& name, const ModelArgs& args);

}  // namespace syncbn::models
