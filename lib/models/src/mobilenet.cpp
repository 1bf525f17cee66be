#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

#include "backbones.h"
#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

// Blocks are inverted residuals: a 1x1 convolution to more channels, a depthwise one, and a 1x1
// convolution back without activation.

// ---- V2 ---------------------------------------------------------------------------------------

std::shared_ptr<Residual> block_v2(int64_t in, int64_t out, int64_t stride, int64_t expansion,
                                   const NormFactory& norm) {
  const int64_t width = in * expansion;
  auto layers = std::make_shared<Chain>();
  if (expansion != 1) {
    layers->add(conv_norm(in, width, norm, {.kernel = 1, .activation = Activation::kRelu6}));
  }
  layers->add(conv_norm(width, width, norm,
                        {.stride = stride, .groups = width, .activation = Activation::kRelu6}));
  layers->add_conv_norm(width, out, norm, {.kernel = 1, .activation = Activation::kNone});
  return std::make_shared<Residual>("conv", layers, stride == 1 && in == out);
}

std::shared_ptr<Model> mobilenet_v2(const std::string& name, const ModelArgs& args,
                                    const DropoutOptions& options) {
  const int64_t channels = image_channels(name, args, 1);
  const NormFactory norm(args);
  auto features = std::make_shared<Chain>(args.activation_checkpointing);
  features->add(conv_norm(channels, 32, norm, {.stride = 2, .activation = Activation::kRelu6}));
  struct Stage {
    int64_t expansion, out;
    int depth;
    int64_t stride;
  };
  int64_t in = 32;
  for (const Stage& stage : {Stage{1, 16, 1, 1},
                             {6, 24, 2, 2},
                             {6, 32, 3, 2},
                             {6, 64, 4, 2},
                             {6, 96, 3, 1},
                             {6, 160, 3, 2},
                             {6, 320, 1, 1}}) {
    for (int i = 0; i < stage.depth; ++i) {
      features->add(block_v2(in, stage.out, i == 0 ? stage.stride : 1, stage.expansion, norm));
      in = stage.out;
    }
  }
  constexpr int64_t kLast = 1280;
  features->add(conv_norm(in, kLast, norm, {.kernel = 1, .activation = Activation::kRelu6}));
  auto net = std::make_shared<FeatureNet>(
      features, 1, linear_classifier(kLast, args.num_classes, options.dropout.value_or(0.2)));
  init_layers(*net, kaiming_init(), normal_init(0.01));
  return net;
}

// ---- V3 ---------------------------------------------------------------------------------------

struct BlockV3 {
  int64_t kernel, expanded, out;
  bool squeezes;
  Activation activation;
  int64_t stride;
  int64_t dilation = 1;
};

std::shared_ptr<Residual> block_v3(int64_t in, const BlockV3& block, const NormFactory& norm) {
  auto layers = std::make_shared<Chain>();
  if (block.expanded != in) {
    layers->add(conv_norm(in, block.expanded, norm, {.kernel = 1, .activation = block.activation}));
  }
  layers->add(conv_norm(block.expanded, block.expanded, norm,
                        {.kernel = block.kernel,
                         .stride = block.stride,
                         .groups = block.expanded,
                         .activation = block.activation,
                         .dilation = block.dilation}));
  if (block.squeezes) {
    const int64_t quarter = block.expanded / 4;
    const int64_t squeezed = make_divisible(static_cast<double>(quarter));
    layers->add(std::make_shared<SqueezeExcitation>(block.expanded, squeezed, Activation::kRelu,
                                                    Activation::kHardsigmoid));
  }
  layers->add(
      conv_norm(block.expanded, block.out, norm, {.kernel = 1, .activation = Activation::kNone}));
  return std::make_shared<Residual>("block", layers, block.stride == 1 && in == block.out);
}

/// @param hidden units of the classifier
std::shared_ptr<FeatureNet> mobilenet_v3(const std::string& name, const ModelArgs& args,
                                         const DropoutOptions& options,
                                         const std::vector<BlockV3>& blocks, int64_t hidden) {
  const int64_t channels = image_channels(name, args, 1);
  const NormFactory norm(args, /*eps=*/1e-3, /*momentum=*/0.01);
  auto features = std::make_shared<Chain>(args.activation_checkpointing);
  int64_t in = 16;
  features->add(conv_norm(channels, in, norm, {.stride = 2, .activation = Activation::kHardswish}));
  for (const BlockV3& block : blocks) {
    features->add(block_v3(in, block, norm));
    in = block.out;
  }
  features->add(conv_norm(in, 6 * in, norm, {.kernel = 1, .activation = Activation::kHardswish}));
  auto classifier = std::make_shared<Chain>();
  classifier->add(torch::nn::Linear(6 * in, hidden));
  classifier->add_step([](const at::Tensor& x) { return activate(x, Activation::kHardswish); });
  classifier->add_dropout(options.dropout.value_or(0.2));
  classifier->add(torch::nn::Linear(hidden, args.num_classes));
  auto net = std::make_shared<FeatureNet>(features, 1, classifier);
  init_layers(*net, kaiming_init(), normal_init(0.01));
  return net;
}

constexpr int64_t kLargeHidden = 1280;

std::vector<BlockV3> blocks_of_large() {
  constexpr Activation kRelu = Activation::kRelu;
  constexpr Activation kSwish = Activation::kHardswish;
  return {{3, 16, 16, false, kRelu, 1},   {3, 64, 24, false, kRelu, 2},
          {3, 72, 24, false, kRelu, 1},   {5, 72, 40, true, kRelu, 2},
          {5, 120, 40, true, kRelu, 1},   {5, 120, 40, true, kRelu, 1},
          {3, 240, 80, false, kSwish, 2}, {3, 200, 80, false, kSwish, 1},
          {3, 184, 80, false, kSwish, 1}, {3, 184, 80, false, kSwish, 1},
          {3, 480, 112, true, kSwish, 1}, {3, 672, 112, true, kSwish, 1},
          {5, 672, 160, true, kSwish, 2}, {5, 960, 160, true, kSwish, 1},
          {5, 960, 160, true, kSwish, 1}};
}

}  // namespace

Backbone dilated_mobilenet_v3_large(const std::string& name, const ModelArgs& args) {
  std::vector<BlockV3> blocks = blocks_of_large();
  for (size_t i = 12; i < blocks.size(); ++i) blocks[i].stride = 1, blocks[i].dilation = 2;
  ModelArgs pretrained = args;
  pretrained.num_classes = 1000;  // of the classifier, which torchvision draws and then drops
  const auto net = mobilenet_v3(name, pretrained, DropoutOptions{}, blocks, kLargeHidden);
  return {.module = net->features(), .features = [features = net->features()](const at::Tensor& x) {
            return features->forward(x, {4, 16});
          }};
}

void add_mobilenets(ModelKind::Registry& registry) {
  add_model<DropoutOptions>(registry, "mobilenet_v2",
                            "MobileNetV2 (Sandler et al., arXiv:1801.04381)", mobilenet_v2);
  const auto add = [&registry](const std::string& name, const std::vector<BlockV3>& blocks,
                               int64_t hidden) {
    add_model<DropoutOptions>(registry, name, "MobileNetV3 (Howard et al., arXiv:1905.02244)",
                              mobilenet_v3, blocks, hidden);
  };
  constexpr Activation kRelu = Activation::kRelu;
  constexpr Activation kSwish = Activation::kHardswish;
  add("mobilenet_v3_large", blocks_of_large(), kLargeHidden);
  add("mobilenet_v3_small",
      {{3, 16, 16, true, kRelu, 2},
       {3, 72, 24, false, kRelu, 2},
       {3, 88, 24, false, kRelu, 1},
       {5, 96, 40, true, kSwish, 2},
       {5, 240, 40, true, kSwish, 1},
       {5, 240, 40, true, kSwish, 1},
       {5, 120, 48, true, kSwish, 1},
       {5, 144, 48, true, kSwish, 1},
       {5, 288, 96, true, kSwish, 2},
       {5, 576, 96, true, kSwish, 1},
       {5, 576, 96, true, kSwish, 1}},
      1024);
}

}  // namespace syncbn::models
