#include <ATen/ops/cat.h>
#include <ATen/ops/mean.h>
#include <torch/nn/init.h>

#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

/// A 1x1 convolution to few channels, and 1x1 and 3x3 convolutions side by side.
class Fire : public torch::nn::Module {
 public:
  /// @param expanded channels of each of the two
  Fire(int64_t in, int64_t squeezed, int64_t expanded)
      : squeeze_(torch::nn::Conv2dOptions(in, squeezed, 1)),
        expand1x1_(torch::nn::Conv2dOptions(squeezed, expanded, 1)),
        expand3x3_(torch::nn::Conv2dOptions(squeezed, expanded, 3).padding(1)) {
    register_module("squeeze", squeeze_);
    register_module("expand1x1", expand1x1_);
    register_module("expand3x3", expand3x3_);
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor squeezed = squeeze_->forward(x).relu_();
    return at::cat({expand1x1_->forward(squeezed).relu_(), expand3x3_->forward(squeezed).relu_()},
                   1);
  }

 private:
  torch::nn::Conv2d squeeze_;
  torch::nn::Conv2d expand1x1_;
  torch::nn::Conv2d expand3x3_;
};

struct SqueezeNetShape {
  int64_t channels, kernel;        ///< of the first convolution
  std::vector<size_t> pool_ahead;  ///< Fire modules that follow a pooling layer
  int64_t min_side;
};

class SqueezeNet : public Model {
 public:
  SqueezeNet(const std::string& name, const ModelArgs& args, const DropoutOptions& options,
             const SqueezeNetShape& shape)
      : features_(std::make_shared<Chain>(args.activation_checkpointing)),
        classifier_(std::make_shared<Chain>()) {
    features_->add(conv_with_bias(image_channels(name, args, shape.min_side), shape.channels,
                                  shape.kernel, 2, /*padding=*/0));
    features_->add_relu();
    int64_t in = shape.channels;
    for (size_t i = 0; i < 8; ++i) {
      if (std::ranges::count(shape.pool_ahead, i) > 0) {
        features_->add_max_pool(3, 2, 0, /*ceil_mode=*/true);
      }
      const auto level = static_cast<int64_t>(i / 2 + 1);  // two modules of each size
      features_->add(std::make_shared<Fire>(in, 16 * level, 64 * level));
      in = 128 * level;
    }
    register_module("features", features_);
    classifier_->add_dropout(options.dropout.value_or(0.5));
    const auto last = classifier_->add(conv_with_bias(in, args.num_classes, 1));
    classifier_->add_relu();
    register_module("classifier", classifier_);
    init_layers(*this,
                [&last](const at::Tensor& weight) {
                  if (weight.is_same(last->weight)) {
                    torch::nn::init::normal_(weight, 0, 0.01);
                  } else {
                    torch::nn::init::kaiming_uniform_(weight);
                  }
                },
                {});
  }

  at::Tensor forward(at::Tensor x) override {
    return at::mean(classifier_->forward(features_->forward(x)), {2, 3});
  }

 private:
  std::shared_ptr<Chain> features_;
  std::shared_ptr<Chain> classifier_;
};

}  // namespace

void add_squeezenets(ModelKind::Registry& registry) {
  const auto add = [&registry](const std::string& name, const SqueezeNetShape& shape) {
    add_network<DropoutOptions, SqueezeNet>(registry, name,
                                            "SqueezeNet (Iandola et al., arXiv:1602.07360)", shape);
  };
  add("squeezenet1_0", {.channels = 96, .kernel = 7, .pool_ahead = {0, 3, 7}, .min_side = 21});
  add("squeezenet1_1", {.channels = 64, .kernel = 3, .pool_ahead = {0, 2, 4}, .min_side = 17});
}

}  // namespace syncbn::models
