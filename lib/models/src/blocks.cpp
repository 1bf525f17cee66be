#include "blocks.h"

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/checkpoint.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace syncbn::models {

int64_t image_channels(const std::string& model, const ModelArgs& args, int64_t min_side) {
  const auto& shape = args.sample_shape;
  if (shape.size() != 3 || shape[0] < 1 || shape[1] < min_side || shape[2] < min_side) {
    throw base::UserError(fmt::format(
        "model {}: takes images [channels, height, width] of at least {} x {} pixels, the data "
        "set's samples have the shape [{}]",
        model, min_side, min_side, fmt::join(shape, ", ")));
  }
  if (args.num_classes < 1) {
    throw base::UserError(
        fmt::format("model {}: needs at least one class, got {}", model, args.num_classes));
  }
  return shape[0];
}

void refuse_recomputation(const std::string& model, const ModelArgs& args) {
  if (!args.activation_checkpointing) return;
  throw base::UserError(
      fmt::format("activation_checkpointing: the network {} has no blocks to compute again; set it "
                  "to false, or choose another network",
                  model));
}

int64_t make_divisible(double channels, int64_t divisor) {
  const auto to_nearest = static_cast<int64_t>(channels + static_cast<double>(divisor) / 2);
  const int64_t rounded = std::max(divisor, to_nearest / divisor * divisor);
  return static_cast<double>(rounded) < 0.9 * channels ? rounded + divisor : rounded;
}

at::Tensor activate(at::Tensor x, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      return x.relu_();
    case Activation::kRelu6:
      return at::hardtanh_(x, 0, 6);
    case Activation::kHardswish:
      return at::hardswish(x);
    case Activation::kSilu:
      return at::silu(x);
    case Activation::kSigmoid:
      return at::sigmoid(x);
    case Activation::kHardsigmoid:
      return at::hardsigmoid(x);
  }
  return x;
}

torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t groups,
                       int64_t dilation) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel)
                               .stride(stride)
                               .padding(dilation * (kernel - 1) / 2)
                               .dilation(dilation)
                               .groups(groups)
                               .bias(false));
}

torch::nn::Conv2d conv_with_bias(int64_t in, int64_t out, int64_t kernel, int64_t stride,
                                 std::optional<int64_t> padding) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel)
                               .stride(stride)
                               .padding(padding.value_or(kernel / 2)));
}

at::Tensor drop_path(const at::Tensor& x, double probability) {
  const double kept = 1 - probability;
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[0] = x.size(0);
  const at::Tensor mask = at::empty(shape, x.options().requires_grad(false));
  return x * mask.bernoulli_(kept).div_(kept);
}

void Chain::add_step(Step step) {
  steps_.push_back(std::move(step));
  ++layers_;
}

void Chain::add_relu() {
  // A layer that is recomputed in the backward pass must find its input unchanged.
  add_step([recompute = recompute_](const at::Tensor& x) {
    return recompute ? at::relu(x) : at::Tensor(x).relu_();
  });
}

void Chain::add_dropout(double probability) {
  add_step([this, probability](const at::Tensor& x) {
    return at::dropout(x, probability, is_training());
  });
}

void Chain::add_max_pool(int64_t kernel, int64_t stride, int64_t padding, bool ceil_mode) {
  add_step([=](const at::Tensor& x) {
    return at::max_pool2d(x, kernel, stride, padding, /*dilation=*/1, ceil_mode);
  });
}

void Chain::add_norm(const NormFactory& norm, int64_t channels, Activation activation,
                     const std::string& name) {
  if (activation == Activation::kRelu) {
    NormRelu layer = norm.with_relu(channels);
    add_name(layer.ptr(), name);
    add_step([layer](const at::Tensor& x) mutable { return layer.forward(x); });
    return;
  }
  torch::nn::AnyModule layer = norm(channels);
  add_name(layer.ptr(), name);
  steps_.emplace_back([layer](const at::Tensor& x) mutable { return layer.forward(x); });
  if (activation == Activation::kNone) return;
  add_step([activation](const at::Tensor& x) { return activate(x, activation); });
}

void Chain::add_conv_norm(int64_t in, int64_t out, const NormFactory& norm,
                          const ConvNormOptions& options) {
  add(conv(in, out, options.kernel, options.stride, options.groups, options.dilation));
  add_norm(norm, out, options.activation);
}

at::Tensor Chain::run(const Step& step, const at::Tensor& x) const {
  return recompute_ ? dist::checkpoint(step, x) : step(x);
}

at::Tensor Chain::forward(const at::Tensor& x) const {
  at::Tensor y = x;
  for (const Step& step : steps_) y = run(step, y);
  return y;
}

std::vector<at::Tensor> Chain::forward(const at::Tensor& x,
                                       std::initializer_list<size_t> kept) const {
  std::vector<at::Tensor> outputs;
  at::Tensor y = x;
  for (size_t i = 0; outputs.size() < kept.size(); ++i) {
    y = run(steps_.at(i), y);
    if (i == kept.begin()[outputs.size()]) outputs.push_back(y);
  }
  return outputs;
}

std::shared_ptr<Chain> conv_norm(int64_t in, int64_t out, const NormFactory& norm,
                                 const ConvNormOptions& options) {
  auto chain = std::make_shared<Chain>();
  chain->add_conv_norm(in, out, norm, options);
  return chain;
}

at::Tensor scaled_to(const at::Tensor& x, at::IntArrayRef size) {
  if (x.sizes().slice(2) == size) return x;
  return at::upsample_bilinear2d(x, size, /*align_corners=*/false);
}

void Branches::add(std::shared_ptr<Chain> branch, const std::string& name) {
  branches_.push_back(
      register_module(name.empty() ? std::to_string(size()) : name, std::move(branch)));
}

at::Tensor Branches::forward(const at::Tensor& x) const {
  std::vector<at::Tensor> outputs;
  if (keeps_input_) outputs.push_back(x);
  for (const auto& branch : branches_) {
    outputs.push_back(scaled_to(branch->forward(x), x.sizes().slice(2)));
  }
  return at::cat(outputs, 1);
}

SqueezeExcitation::SqueezeExcitation(int64_t channels, int64_t squeezed, Activation activation,
                                     Activation scale_activation)
    : fc1_(torch::nn::Conv2dOptions(channels, squeezed, 1)),
      fc2_(torch::nn::Conv2dOptions(squeezed, channels, 1)),
      activation_(activation),
      scale_activation_(scale_activation) {
  register_module("fc1", fc1_);
  register_module("fc2", fc2_);
}

at::Tensor SqueezeExcitation::forward(const at::Tensor& x) {
  at::Tensor scale = at::adaptive_avg_pool2d(x, {1, 1});
  scale = activate(fc1_->forward(scale), activation_);
  return x * activate(fc2_->forward(scale), scale_activation_);
}

Residual::Residual(const std::string& name, std::shared_ptr<Chain> layers, bool has_shortcut,
                   double drop_path)
    : layers_(register_module(name, std::move(layers))),
      has_shortcut_(has_shortcut),
      drop_path_(drop_path) {}

at::Tensor Residual::forward(const at::Tensor& x) {
  at::Tensor y = layers_->forward(x);
  if (!has_shortcut_) return y;
  if (drop_path_ > 0 && is_training()) y = drop_path(y, drop_path_);
  return y.add_(x);
}

FeatureNet::FeatureNet(std::shared_ptr<Chain> features, int64_t pooled,
                       std::shared_ptr<Chain> classifier, const std::string& name)
    : features_(register_module(name, std::move(features))),
      pooled_(pooled),
      classifier_(register_module("classifier", std::move(classifier))) {}

at::Tensor FeatureNet::forward(at::Tensor x) {
  x = at::adaptive_avg_pool2d(features_->forward(x), {pooled_, pooled_});
  return classifier_->forward(x.flatten(1));
}

std::shared_ptr<Chain> linear_classifier(int64_t in, int64_t classes, double dropout) {
  auto chain = std::make_shared<Chain>();
  chain->add_dropout(dropout);
  chain->add(torch::nn::Linear(in, classes));
  return chain;
}

Init normal_init(double std) {
  return [std](const at::Tensor& weight) { torch::nn::init::normal_(weight, 0, std); };
}

Init kaiming_init() {
  return [](const at::Tensor& weight) {
    torch::nn::init::kaiming_normal_(weight, 0, torch::kFanOut, torch::kReLU);
  };
}

Init truncated_normal_init(double std) {
  return [std](const at::Tensor& weight) {
    const at::NoGradGuard no_grad;
    constexpr double kBound = 2;
    const double bound = 2 * (1 + std::erf(kBound / std / std::numbers::sqrt2)) / 2 - 1;
    weight.uniform_(-bound, bound).erfinv_().mul_(std * std::numbers::sqrt2);
    weight.clamp_(-kBound, kBound);
  };
}

void init_layers(torch::nn::Module& model, const Init& convolution, const Init& linear) {
  for (const auto& module : model.modules(/*include_self=*/false)) {
    const bool is_convolution = module->as<torch::nn::Conv2dImpl>() != nullptr;
    if (!is_convolution && module->as<torch::nn::LinearImpl>() == nullptr) continue;
    const Init& fill = is_convolution ? convolution : linear;
    if (!fill) continue;
    const auto parameters = module->named_parameters(/*recurse=*/false);
    fill(parameters["weight"]);
    if (const at::Tensor* bias = parameters.find("bias")) torch::nn::init::zeros_(*bias);
  }
}

namespace {

constexpr const char* kDropoutHelp =
    "probability that an input of a linear layer at the end is left out in training; null: the "
    "network's own";

}  // namespace

void DropoutOptions::describe(config::Schema<DropoutOptions>& schema) {
  schema.field("dropout", &DropoutOptions::dropout, kDropoutHelp).fraction();
}

void DropPathOptions::describe(config::Schema<DropPathOptions>& schema) {
  schema.field("dropout", &DropPathOptions::dropout, kDropoutHelp).fraction();
  schema
      .field("stochastic_depth", &DropPathOptions::stochastic_depth,
             "probability that a sample skips the last block in training; it rises linearly from 0 "
             "in the first block; null: the network's own")
      .fraction();
}

}  // namespace syncbn::models
