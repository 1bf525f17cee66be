#include "feature_pyramid.h"

#include <ATen/ops/relu.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <torch/nn/init.h>

namespace syncbn::models {
namespace {

std::shared_ptr<Chain> pyramid_conv(int64_t in, int64_t kernel) {
  auto chain = std::make_shared<Chain>();
  chain->add(conv_with_bias(in, ResNetFpn::kChannels, kernel));
  return chain;
}

void init_pyramid(torch::nn::Module& layers) {
  const Init init = [](const at::Tensor& weight) {
    torch::nn::init::kaiming_uniform_(weight, /*a=*/1);
  };
  init_layers(layers, init, {});
}

}  // namespace

ResNetFpn::ResNetFpn(const std::string& name, const ModelArgs& args, const ResNetStages& stages,
                     bool p6_from_c5)
    : body_(resnet_backbone(name, args, stages)), p6_from_c5_(p6_from_c5) {
  const auto channels = stages.channels();
  // Initialised before the other layers, as in torchvision: a seed then gives the same weights.
  const auto extra = std::make_shared<Chain>();
  p6_ = extra->add(conv_with_bias(p6_from_c5 ? channels.back() : kChannels, kChannels, 3, 2), "p6");
  p7_ = extra->add(conv_with_bias(kChannels, kChannels, 3, 2), "p7");
  init_pyramid(*extra);

  const auto inner = std::make_shared<Chain>();
  const auto outer = std::make_shared<Chain>();
  for (size_t stage = 1; stage < channels.size(); ++stage) {  // C3 to C5
    lateral_.push_back(inner->add(pyramid_conv(channels[stage], 1)));
    smooth_.push_back(outer->add(pyramid_conv(kChannels, 3)));
  }
  const auto fpn = std::make_shared<Chain>();
  fpn->add_name(inner, "inner_blocks");
  fpn->add_name(outer, "layer_blocks");
  init_pyramid(*fpn);
  fpn->add_name(extra, "extra_blocks");
  register_module("body", body_.module);
  register_module("fpn", fpn);
}

std::vector<at::Tensor> ResNetFpn::forward(const at::Tensor& images) {
  const std::vector<at::Tensor> stages = body_.features(images);  // C2 to C5
  std::vector<at::Tensor> levels(lateral_.size());
  at::Tensor coarser;
  for (size_t i = levels.size(); i-- > 0;) {
    at::Tensor merged = lateral_[i]->forward(stages[i + 1]);
    if (coarser.defined()) {
      merged = merged + at::upsample_nearest2d(coarser, merged.sizes().slice(2));
    }
    coarser = merged;
    levels[i] = smooth_[i]->forward(merged);
  }
  levels.push_back(p6_->forward(p6_from_c5_ ? stages.back() : levels.back()));
  levels.push_back(p7_->forward(at::relu(levels.back())));
  return levels;
}

}  // namespace syncbn::models
