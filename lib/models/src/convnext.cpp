#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

struct ConvNeXtShape {
  int64_t width = 0;        ///< channels of the first stage
  std::vector<int> depths;  ///< blocks of each stage
  double stochastic_depth = 0;
};

torch::nn::LayerNormOptions layer_norm(int64_t channels) {
  return torch::nn::LayerNormOptions({channels}).eps(1e-6);
}

at::Tensor channels_last(const at::Tensor& x) {
  return x.permute({0, 2, 3, 1});
}
at::Tensor channels_first(const at::Tensor& x) {
  return x.permute({0, 3, 1, 2});
}

/// Layer norm over the channels of each pixel.
class LayerNorm2d : public torch::nn::LayerNormImpl {
 public:
  explicit LayerNorm2d(int64_t channels) : torch::nn::LayerNormImpl(layer_norm(channels)) {}

  at::Tensor forward(const at::Tensor& x) {
    return channels_first(torch::nn::LayerNormImpl::forward(channels_last(x)));
  }
};

/// A depthwise 7x7 convolution and a linear layer to four times as many channels and back.
class ConvNeXtBlock : public torch::nn::Module {
 public:
  ConvNeXtBlock(int64_t channels, double drop_path)
      : layers_(std::make_shared<Chain>()), drop_path_(drop_path) {
    constexpr double kLayerScale = 1e-6;
    layers_->add(torch::nn::Conv2d(
        torch::nn::Conv2dOptions(channels, channels, 7).padding(3).groups(channels)));
    layers_->add_step(channels_last);
    layers_->add(torch::nn::LayerNorm(layer_norm(channels)));
    layers_->add(torch::nn::Linear(channels, 4 * channels));
    layers_->add_step([](const at::Tensor& x) { return at::gelu(x); });
    layers_->add(torch::nn::Linear(4 * channels, channels));
    layers_->add_step(channels_first);
    register_module("block", layers_);
    layer_scale_ = register_parameter("layer_scale", at::full({channels, 1, 1}, kLayerScale));
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = layer_scale_ * layers_->forward(x);
    if (drop_path_ > 0 && is_training()) y = drop_path(y, drop_path_);
    return y.add_(x);
  }

 private:
  std::shared_ptr<Chain> layers_;
  at::Tensor layer_scale_;
  double drop_path_;
};

std::shared_ptr<Model> convnext(const std::string& name, const ModelArgs& args,
                                const DropPathOptions& options, const ConvNeXtShape& shape) {
  const int64_t channels = image_channels(name, args, 32);
  const double drop_path = options.stochastic_depth.value_or(shape.stochastic_depth);
  int blocks = 0;
  for (const int depth : shape.depths) blocks += depth;

  // Convolutions with a stride of their own size divide the image into squares.
  auto features = std::make_shared<Chain>();
  int64_t width = shape.width;
  auto stem = std::make_shared<Chain>();
  stem->add(conv_with_bias(channels, width, 4, 4, /*padding=*/0));
  stem->add(std::make_shared<LayerNorm2d>(width));
  features->add(stem);
  int block = 0;
  for (size_t i = 0; i < shape.depths.size(); ++i) {
    if (i > 0) {
      auto downsampling = std::make_shared<Chain>();
      downsampling->add(std::make_shared<LayerNorm2d>(width));
      downsampling->add(conv_with_bias(width, 2 * width, 2, 2, /*padding=*/0));
      features->add(downsampling);
      width *= 2;
    }
    auto stage = std::make_shared<Chain>(args.activation_checkpointing);
    for (int k = 0; k < shape.depths[i]; ++k) {
      stage->add(std::make_shared<ConvNeXtBlock>(width, drop_path * block++ / (blocks - 1)));
    }
    features->add(stage);
  }
  auto classifier = std::make_shared<Chain>();
  classifier->add(torch::nn::LayerNorm(layer_norm(width)));
  classifier->add_dropout(options.dropout.value_or(0));
  classifier->add(torch::nn::Linear(width, args.num_classes));
  auto net = std::make_shared<FeatureNet>(features, 1, classifier);
  init_layers(*net, truncated_normal_init(0.02), truncated_normal_init(0.02));
  return net;
}

}  // namespace

void add_convnexts(ModelKind::Registry& registry) {
  const auto add = [&registry](const std::string& name, const ConvNeXtShape& shape) {
    add_model<DropPathOptions>(registry, name, "ConvNeXt (Liu et al., arXiv:2201.03545)", convnext,
                               shape);
  };
  add("convnext_tiny", {96, {3, 3, 9, 3}, 0.1});
  add("convnext_small", {96, {3, 3, 27, 3}, 0.4});
  add("convnext_base", {128, {3, 3, 27, 3}, 0.5});
  add("convnext_large", {192, {3, 3, 27, 3}, 0.5});
}

}  // namespace syncbn::models
