#include <torch/nn/init.h>

#include <memory>
#include <string>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

/// 1x1, depthwise and 1x1 convolutions, the last without activation.
std::shared_ptr<Residual> mnas_block(int64_t in, int64_t out, int64_t kernel, int64_t stride,
                                     int64_t expansion, const NormFactory& norm) {
  const int64_t width = in * expansion;
  auto layers = std::make_shared<Chain>();
  layers->add_conv_norm(in, width, norm, {.kernel = 1});
  layers->add_conv_norm(width, width, norm, {.kernel = kernel, .stride = stride, .groups = width});
  layers->add_conv_norm(width, out, norm, {.kernel = 1, .activation = Activation::kNone});
  return std::make_shared<Residual>("layers", layers, stride == 1 && in == out);
}

std::shared_ptr<Model> mnasnet(const std::string& name, const ModelArgs& args,
                               const DropoutOptions& options, double multiplier) {
  const auto scaled = [multiplier](int channels) { return make_divisible(channels * multiplier); };
  const int64_t channels = image_channels(name, args, 1);
  // TensorFlow's momentum 0.9997.
  const NormFactory norm(args, /*eps=*/1e-5, /*momentum=*/1 - 0.9997);

  auto layers = std::make_shared<Chain>();
  const int64_t stem = scaled(32);
  layers->add_conv_norm(channels, stem, norm, {.stride = 2});
  layers->add_conv_norm(stem, stem, norm, {.groups = stem});
  int64_t in = scaled(16);
  layers->add_conv_norm(stem, in, norm, {.kernel = 1, .activation = Activation::kNone});
  struct Stage {
    int out;
    int64_t kernel, stride, expansion;
    int depth;
  };
  for (const Stage& stage : {Stage{24, 3, 2, 3, 3},
                             {40, 5, 2, 3, 3},
                             {80, 5, 2, 6, 3},
                             {96, 3, 1, 6, 2},
                             {192, 5, 2, 6, 4},
                             {320, 3, 1, 6, 1}}) {
    auto blocks = std::make_shared<Chain>(args.activation_checkpointing);
    const int64_t out = scaled(stage.out);
    for (int i = 0; i < stage.depth; ++i) {
      blocks->add(
          mnas_block(in, out, stage.kernel, i == 0 ? stage.stride : 1, stage.expansion, norm));
      in = out;
    }
    layers->add(blocks);
  }
  constexpr int64_t kLast = 1280;
  layers->add_conv_norm(in, kLast, norm, {.kernel = 1});
  auto net = std::make_shared<FeatureNet>(
      layers, 1, linear_classifier(kLast, args.num_classes, options.dropout.value_or(0.2)),
      "layers");
  init_layers(*net, kaiming_init(), [](const at::Tensor& weight) {
    torch::nn::init::kaiming_uniform_(weight, 0, torch::kFanOut, torch::kSigmoid);
  });
  return net;
}

}  // namespace

void add_mnasnets(ModelKind::Registry& registry) {
  const auto add = [&registry](const std::string& name, double multiplier) {
    add_model<DropoutOptions>(registry, name, "MNASNet-B1 (Tan et al., arXiv:1807.11626)", mnasnet,
                              multiplier);
  };
  add("mnasnet0_5", 0.5);
  add("mnasnet0_75", 0.75);
  add("mnasnet1_0", 1.0);
  add("mnasnet1_3", 1.3);
}

}  // namespace syncbn::models
