#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <syncbn/dist/checkpoint.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

struct DenseNetOptions {
  double dropout = 0;

  static void describe(config::Schema<DenseNetOptions>& schema) {
    schema
        .field("dropout", &DenseNetOptions::dropout,
               "probability that a value which a dense layer computes is left out in training")
        .fraction();
  }
};

/// Computes `growth` new channels from all previous ones: batch norm, ReLU and convolution, first
/// 1x1, then 3x3.
class DenseLayer : public torch::nn::Module {
 public:
  DenseLayer(int64_t in, int64_t growth, double dropout, bool recomputes, const NormFactory& norm)
      : dropout_(dropout),
        recomputes_(recomputes),
        norm1_(norm.with_relu(in)),
        conv1_(conv(in, kBottleneck * growth, 1)),
        norm2_(norm.with_relu(kBottleneck * growth)),
        conv2_(conv(kBottleneck * growth, growth, 3)) {
    register_module("norm1", norm1_.ptr());
    register_module("conv1", conv1_);
    register_module("norm2", norm2_.ptr());
    register_module("conv2", conv2_);
  }

  at::Tensor forward(const std::vector<at::Tensor>& features) {
    if (!recomputes_) return compute(features);
    const auto layer = std::static_pointer_cast<DenseLayer>(shared_from_this());
    return dist::checkpoint(
               [layer](const std::vector<at::Tensor>& inputs) {
                 return std::vector<at::Tensor>{layer->compute(inputs)};
               },
               features)
        .front();
  }

 private:
  static constexpr int64_t kBottleneck = 4;

  at::Tensor compute(const std::vector<at::Tensor>& features) {
    at::Tensor y = conv1_->forward(norm1_.forward(at::cat(features, 1)));
    y = conv2_->forward(norm2_.forward(y));
    return at::dropout(y, dropout_, is_training());
  }

  double dropout_;
  bool recomputes_;
  NormRelu norm1_;
  torch::nn::Conv2d conv1_;
  NormRelu norm2_;
  torch::nn::Conv2d conv2_;
};

class DenseBlock : public torch::nn::Module {
 public:
  void add(std::shared_ptr<DenseLayer> layer) {
    layers_.push_back(std::move(layer));
    register_module("denselayer" + std::to_string(layers_.size()), layers_.back());
  }

  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> features = {x};
    for (const auto& layer : layers_) features.push_back(layer->forward(features));
    return at::cat(features, 1);
  }

 private:
  std::vector<std::shared_ptr<DenseLayer>> layers_;
};

/// Halves channels and resolution.
std::shared_ptr<Chain> transition(int64_t in, const NormFactory& norm) {
  auto chain = std::make_shared<Chain>();
  chain->add_norm(norm, in, Activation::kRelu, "norm");
  chain->add(conv(in, in / 2, 1), "conv");
  chain->add_step([](const at::Tensor& x) { return at::avg_pool2d(x, 2, 2); });
  return chain;
}

class DenseNet : public Model {
 public:
  DenseNet(const std::string& name, const ModelArgs& args, const DenseNetOptions& options,
           int64_t growth, const std::vector<int>& depths) {
    const NormFactory norm(args);
    int64_t channels = 2 * growth;
    features_ = std::make_shared<Chain>();
    features_->add(conv(image_channels(name, args, 29), channels, 7, 2), "conv0");
    features_->add_norm(norm, channels, Activation::kRelu, "norm0");
    features_->add_max_pool(3, 2, 1);
    for (size_t i = 0; i < depths.size(); ++i) {
      const std::string number = std::to_string(i + 1);
      auto block = std::make_shared<DenseBlock>();
      for (int k = 0; k < depths[i]; ++k) {
        block->add(std::make_shared<DenseLayer>(channels, growth, options.dropout,
                                                args.activation_checkpointing, norm));
        channels += growth;
      }
      features_->add(block, "denseblock" + number);
      if (i + 1 == depths.size()) break;
      features_->add(transition(channels, norm), "transition" + number);
      channels /= 2;
    }
    features_->add_norm(norm, channels, Activation::kRelu, "norm5");
    register_module("features", features_);
    classifier_ = register_module("classifier", torch::nn::Linear(channels, args.num_classes));
    init_layers(
        *this, [](const at::Tensor& weight) { torch::nn::init::kaiming_normal_(weight); },
        [](const at::Tensor&) {});
  }

  at::Tensor forward(at::Tensor x) override {
    x = at::adaptive_avg_pool2d(features_->forward(x), {1, 1});
    return classifier_->forward(x.flatten(1));
  }

  /// In torchvision's published weights, norm1 is called norm.1, and so on.
  std::string present_name(const std::string& name) const override {
    std::string present = name;
    for (const char* const layer : {".norm.", ".conv."}) {
      const size_t begin = name.find(layer);
      if (begin != std::string::npos) present.erase(begin + 5, 1);
    }
    return present;
  }

 private:
  std::shared_ptr<Chain> features_;
  torch::nn::Linear classifier_{nullptr};
};

}  // namespace

void add_densenets(ModelKind::Registry& registry) {
  const auto add = [&registry](const std::string& name, int64_t growth,
                               const std::vector<int>& depths) {
    add_network<DenseNetOptions, DenseNet>(
        registry, name, "DenseNet (Huang et al., arXiv:1608.06993)", growth, depths);
  };
  add("densenet121", 32, {6, 12, 24, 16});
  add("densenet161", 48, {6, 12, 36, 24});
  add("densenet169", 32, {6, 12, 32, 32});
  add("densenet201", 32, {6, 12, 48, 32});
}

}  // namespace syncbn::models
