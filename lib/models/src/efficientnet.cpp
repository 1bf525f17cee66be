#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

struct EfficientStage {
  bool fused;  ///< one convolution instead of a 1x1 and a depthwise one
  int expansion;
  int64_t kernel, stride, in, out;
  int depth;
};

struct EfficientNetShape {
  std::vector<EfficientStage> stages;
  int64_t last = 0;  ///< channels of the last convolution
  double dropout = 0;
  double eps = 1e-5;  ///< of batch norm, like `momentum`
  double momentum = 0.1;
};

/// Convolution to more channels, depthwise convolution, squeeze and excitation, convolution back.
std::shared_ptr<Chain> mb_conv(const EfficientStage& stage, int64_t in, int64_t stride,
                               const NormFactory& norm) {
  constexpr Activation kSilu = Activation::kSilu;
  auto layers = std::make_shared<Chain>();
  const int64_t width = make_divisible(static_cast<double>(in * stage.expansion));
  if (stage.fused) {
    const ConvNormOptions spatial = {.kernel = stage.kernel, .stride = stride, .activation = kSilu};
    layers->add(conv_norm(in, width == in ? stage.out : width, norm, spatial));
    if (width == in) return layers;
  } else {
    if (width != in) layers->add(conv_norm(in, width, norm, {.kernel = 1, .activation = kSilu}));
    layers->add(conv_norm(
        width, width, norm,
        {.kernel = stage.kernel, .stride = stride, .groups = width, .activation = kSilu}));
    const int64_t squeezed = std::max<int64_t>(1, in / 4);
    layers->add(std::make_shared<SqueezeExcitation>(width, squeezed, kSilu));
  }
  layers->add(conv_norm(width, stage.out, norm, {.kernel = 1, .activation = Activation::kNone}));
  return layers;
}

std::shared_ptr<Model> efficientnet(const std::string& name, const ModelArgs& args,
                                    const DropPathOptions& options,
                                    const EfficientNetShape& shape) {
  const int64_t channels = image_channels(name, args, 1);
  const NormFactory norm(args, shape.eps, shape.momentum);
  const double drop_path = options.stochastic_depth.value_or(0.2);
  int blocks = 0;
  for (const EfficientStage& stage : shape.stages) blocks += stage.depth;

  auto features = std::make_shared<Chain>();
  int64_t in = shape.stages.front().in;
  features->add(conv_norm(channels, in, norm, {.stride = 2, .activation = Activation::kSilu}));
  int block = 0;
  for (const EfficientStage& stage : shape.stages) {
    auto chain = std::make_shared<Chain>(args.activation_checkpointing);
    for (int i = 0; i < stage.depth; ++i) {
      const int64_t stride = i == 0 ? stage.stride : 1;
      chain->add(std::make_shared<Residual>("block", mb_conv(stage, in, stride, norm),
                                            stride == 1 && in == stage.out,
                                            drop_path * block++ / blocks));
      in = stage.out;
    }
    features->add(chain);
  }
  features->add(conv_norm(in, shape.last, norm, {.kernel = 1, .activation = Activation::kSilu}));
  auto net = std::make_shared<FeatureNet>(
      features, 1,
      linear_classifier(shape.last, args.num_classes, options.dropout.value_or(shape.dropout)));
  init_layers(*net, kaiming_init(), [](const at::Tensor& weight) {
    const double bound = 1 / std::sqrt(static_cast<double>(weight.size(0)));
    torch::nn::init::uniform_(weight, -bound, bound);
  });
  return net;
}

/// EfficientNet-B0 with its channels and depths multiplied.
EfficientNetShape scaled(double width, double depth, double dropout) {
  EfficientNetShape shape{.stages = {{false, 1, 3, 1, 32, 16, 1},
                                     {false, 6, 3, 2, 16, 24, 2},
                                     {false, 6, 5, 2, 24, 40, 2},
                                     {false, 6, 3, 2, 40, 80, 3},
                                     {false, 6, 5, 1, 80, 112, 3},
                                     {false, 6, 5, 2, 112, 192, 4},
                                     {false, 6, 3, 1, 192, 320, 1}},
                          .dropout = dropout};
  for (EfficientStage& stage : shape.stages) {
    stage.in = make_divisible(static_cast<double>(stage.in) * width);
    stage.out = make_divisible(static_cast<double>(stage.out) * width);
    stage.depth = static_cast<int>(std::ceil(stage.depth * depth));
  }
  shape.last = 4 * shape.stages.back().out;
  return shape;
}

EfficientNetShape v2(std::vector<EfficientStage> stages, double dropout) {
  return {.stages = std::move(stages), .last = 1280, .dropout = dropout, .eps = 1e-3};
}

}  // namespace

void add_efficientnets(ModelKind::Registry& registry) {
  const auto add = [&registry](const std::string& name, const std::string& help,
                               const EfficientNetShape& shape) {
    add_model<DropPathOptions>(registry, name, help, efficientnet, shape);
  };
  struct Scale {
    double width, depth, dropout;
  };
  int number = 0;
  for (const Scale& scale : {Scale{1.0, 1.0, 0.2},
                             {1.0, 1.1, 0.2},
                             {1.1, 1.2, 0.3},
                             {1.2, 1.4, 0.3},
                             {1.4, 1.8, 0.4},
                             {1.6, 2.2, 0.4},
                             {1.8, 2.6, 0.5},
                             {2.0, 3.1, 0.5}}) {
    EfficientNetShape shape = scaled(scale.width, scale.depth, scale.dropout);
    if (number >= 5) {
      shape.eps = 1e-3;
      shape.momentum = 0.01;
    }
    add("efficientnet_b" + std::to_string(number++), "EfficientNet (Tan and Le, arXiv:1905.11946)",
        shape);
  }

  const std::string help = "EfficientNetV2 (Tan and Le, arXiv:2104.00298)";
  add("efficientnet_v2_s", help,
      v2({{true, 1, 3, 1, 24, 24, 2},
          {true, 4, 3, 2, 24, 48, 4},
          {true, 4, 3, 2, 48, 64, 4},
          {false, 4, 3, 2, 64, 128, 6},
          {false, 6, 3, 1, 128, 160, 9},
          {false, 6, 3, 2, 160, 256, 15}},
         0.2));
  add("efficientnet_v2_m", help,
      v2({{true, 1, 3, 1, 24, 24, 3},
          {true, 4, 3, 2, 24, 48, 5},
          {true, 4, 3, 2, 48, 80, 5},
          {false, 4, 3, 2, 80, 160, 7},
          {false, 6, 3, 1, 160, 176, 14},
          {false, 6, 3, 2, 176, 304, 18},
          {false, 6, 3, 1, 304, 512, 5}},
         0.3));
  add("efficientnet_v2_l", help,
      v2({{true, 1, 3, 1, 32, 32, 4},
          {true, 4, 3, 2, 32, 64, 7},
          {true, 4, 3, 2, 64, 96, 7},
          {false, 4, 3, 2, 96, 192, 10},
          {false, 6, 3, 1, 192, 224, 19},
          {false, 6, 3, 2, 224, 384, 25},
          {false, 6, 3, 1, 384, 640, 7}},
         0.4));
}

}  // namespace syncbn::models
