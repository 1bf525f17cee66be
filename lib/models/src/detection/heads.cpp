#include "heads.h"

#include <ATen/ops/cat.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>

#include "feature_pyramid.h"

namespace syncbn::models {
namespace {

constexpr int64_t kHeadChannels = ResNetFpn::kChannels;
constexpr double kInitStd = 0.01;

torch::nn::Conv2d head_conv(int64_t out, bool bias = true) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(kHeadChannels, out, 3).padding(1).bias(bias));
}

void init_output(torch::nn::Conv2d& conv, double bias) {
  torch::nn::init::normal_(conv->weight, 0, kInitStd);
  torch::nn::init::constant_(conv->bias, bias);
}

/// The convolutions before the last, with default initial values.
std::shared_ptr<Chain> tower(const std::string& head_norm, bool centerness,
                             const NormFactory& norm) {
  auto all = std::make_shared<Chain>();
  for (int i = 0; i < 4; ++i) {
    // FCOS numbers all layers in a row; RetinaNet has a module for each convolution.
    const auto layer = centerness ? all : std::make_shared<Chain>();
    layer->add(head_conv(kHeadChannels, /*bias=*/centerness || head_norm == "none"));
    if (head_norm == "batch") {
      layer->add_norm(norm, kHeadChannels, Activation::kRelu);
    } else {
      if (head_norm == "group") {
        layer->add(torch::nn::GroupNorm(torch::nn::GroupNormOptions(32, kHeadChannels)));
      }
      layer->add_relu();
    }
    if (!centerness) all->add(layer);
  }
  return all;
}

/// [N, anchors * values, h, w] as [N, h * w * anchors, values]. Does not read N, which would become
/// a constant in an exported network.
at::Tensor by_anchor(const at::Tensor& x, int64_t values) {
  return x.unflatten(1, {-1, values}).permute({0, 3, 4, 1, 2}).flatten(1, 3);
}

}  // namespace

DenseHead::DenseHead(const ModelArgs& args, int64_t anchors, const std::string& head_norm,
                     bool centerness)
    : classes_(args.num_classes) {
  const NormFactory norm(args);
  const auto classification = register_module("classification_head", std::make_shared<Chain>());
  const auto regression = register_module("regression_head", std::make_shared<Chain>());

  class_tower_ = classification->add(tower(head_norm, centerness, norm), "conv");
  init_layers(*class_tower_, normal_init(kInitStd), {});
  class_logits_ = classification->add(head_conv(anchors * classes_), "cls_logits");
  // Each class has an initial probability of 0.01 (Lin et al., section 4.1).
  init_output(class_logits_, -std::log((1 - 0.01) / 0.01));

  box_tower_ = regression->add(tower(head_norm, centerness, norm), "conv");
  box_regression_ = regression->add(head_conv(anchors * 4), "bbox_reg");
  if (centerness) {
    centerness_ = regression->add(head_conv(anchors), "bbox_ctrness");
  }
  init_output(box_regression_, 0);
  if (centerness_) init_output(centerness_, 0);
  init_layers(*box_tower_, normal_init(kInitStd), {});
}

std::vector<at::Tensor> DenseHead::forward(const std::vector<at::Tensor>& levels) {
  std::vector<at::Tensor> logits;
  std::vector<at::Tensor> regression;
  std::vector<at::Tensor> centerness;
  for (const at::Tensor& level : levels) {
    logits.push_back(by_anchor(class_logits_->forward(class_tower_->forward(level)), classes_));
    const at::Tensor x = box_tower_->forward(level);
    regression.push_back(by_anchor(box_regression_->forward(x), 4));
    if (centerness_) centerness.push_back(by_anchor(centerness_->forward(x), 1));
  }
  if (!centerness_) return {at::cat(logits, 1), at::cat(regression, 1)};
  return {at::cat(logits, 1), at::cat(regression, 1).relu_(), at::cat(centerness, 1)};
}

}  // namespace syncbn::models
