#include <syncbn/models/digits_net.h>

#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mean.h>
#include <torch/nn/modules/linear.h>

#include <syncbn/models/norm.h>

#include "common.h"

namespace syncbn::models {
namespace {

constexpr int64_t kMaxWidth = 4096;  // more is a typing error: parameters grow with its square

class DigitsNet : public Model {
 public:
  DigitsNet(const ModelArgs& args, const DigitsNetOptions& options)
      : conv1_(conv(image_channels("digits", args, 2), options.width, 3)),
        conv2_(conv(options.width, 2 * options.width, 3)),
        conv3_(conv(2 * options.width, 4 * options.width, 3)),
        fc_(4 * options.width, args.num_classes) {
    const NormFactory norm(args);
    bn1_ = norm.with_relu(options.width);
    bn2_ = norm.with_relu(2 * options.width);
    bn3_ = norm.with_relu(4 * options.width);
    register_module("conv1", conv1_);
    register_module("bn1", bn1_.ptr());
    register_module("conv2", conv2_);
    register_module("bn2", bn2_.ptr());
    register_module("conv3", conv3_);
    register_module("bn3", bn3_.ptr());
    register_module("fc", fc_);
    init_convolutions(*this);
  }

  at::Tensor forward(at::Tensor x) override {
    x = bn1_.forward(conv1_->forward(x));
    x = bn2_.forward(conv2_->forward(x));
    x = at::max_pool2d(x, 2);
    x = bn3_.forward(conv3_->forward(x));
    return fc_->forward(at::mean(x, {2, 3}));
  }

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::Conv2d conv2_;
  torch::nn::Conv2d conv3_;
  torch::nn::Linear fc_;
  NormRelu bn1_;
  NormRelu bn2_;
  NormRelu bn3_;
};

}  // namespace

void DigitsNetOptions::describe(config::Schema<DigitsNetOptions>& schema) {
  schema.field("width", &DigitsNetOptions::width, "channels of the first convolution")
      .at_least(1)
      .at_most(kMaxWidth);
}

std::shared_ptr<Model> digits_net(const ModelArgs& args, const DigitsNetOptions& options) {
  return std::make_shared<DigitsNet>(args, options);
}

}  // namespace syncbn::models
