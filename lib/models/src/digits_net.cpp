#include <syncbn/models/digits_net.h>

#include <ATen/ops/dropout.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mean.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

#include <syncbn/models/norm.h>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

constexpr int64_t kMaxWidth = 4096;  // more is a typing error: parameters grow with its square

class DigitsNet : public Model {
 public:
  DigitsNet(const std::string& name, const ModelArgs& args, const DigitsNetOptions& options)
      : dropout_(options.dropout) {
    refuse_recomputation(name, args);
    const NormFactory norm(args);
    int64_t in = image_channels(name, args, 2);
    for (const int64_t out : {options.width, 2 * options.width, 4 * options.width}) {
      const std::string number = std::to_string(convs_.size() + 1);
      convs_.emplace_back(register_module("conv" + number, conv(in, out, 3)));
      norms_.push_back(norm.with_relu(out));
      register_module("bn" + number, norms_.back().ptr());
      in = out;
    }
    fc_ = register_module("fc", torch::nn::Linear(in, args.num_classes));
    init_layers(*this, kaiming_init(), {});
  }

  at::Tensor forward(at::Tensor x) override {
    for (size_t i = 0; i < convs_.size(); ++i) {
      if (i == 2) x = at::max_pool2d(x, 2);
      x = norms_[i].forward(convs_[i]->forward(x));
    }
    return fc_->forward(at::dropout(at::mean(x, {2, 3}), dropout_, is_training()));
  }

 private:
  double dropout_;
  std::vector<torch::nn::Conv2d> convs_;
  std::vector<NormRelu> norms_;
  torch::nn::Linear fc_{nullptr};
};

}  // namespace

void DigitsNetOptions::describe(config::Schema<DigitsNetOptions>& schema) {
  schema.field("width", &DigitsNetOptions::width, "channels of the first convolution")
      .between(1, kMaxWidth);
  schema.field("dropout", &DigitsNetOptions::dropout, kLastDropoutHelp).fraction();
}

std::shared_ptr<Model> digits_net(const ModelArgs& args, const DigitsNetOptions& options) {
  return ModelKind::registry().make("digits", &options, args);
}

void add_digits(ModelKind::Registry& registry) {
  add_network<DigitsNetOptions, DigitsNet>(
      registry, "digits", "three convolutions and a linear layer, for tiny images");
}

}  // namespace syncbn::models
