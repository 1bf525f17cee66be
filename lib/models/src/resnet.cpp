#include <syncbn/models/resnet.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/max_pool2d.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <numeric>
#include <string>

#include <syncbn/dist/checkpoint.h>
#include <syncbn/models/norm.h>

#include "common.h"

namespace syncbn::models {
namespace {

// Modules are made and registered in torchvision's order: registration sets the order of
// parameters, making sets the order of random draws, so that a seed gives torchvision's weights.

/// A residual block of two 3x3 convolutions or, as a bottleneck, of 1x1, 3x3 and 1x1 convolutions
/// with four times as many output channels.
class Block : public torch::nn::Module {
 public:
  Block(int64_t in, int64_t width, int64_t stride, bool bottleneck, const NormFactory& norm,
        double drop_path) {
    const int64_t out = bottleneck ? 4 * width : width;
    if (stride != 1 || in != out) {
      downsample_ = torch::nn::Sequential(conv(in, out, 1, stride), norm(out));
    }
    if (bottleneck) {
      add(conv(in, width, 1), norm);
      add(conv(width, width, 3, stride), norm);
      add(conv(width, out, 1), norm, drop_path);
    } else {
      add(conv(in, width, 3, stride), norm);
      add(conv(width, width, 3), norm, drop_path);
    }
    if (downsample_) register_module("downsample", downsample_);
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (size_t i = 0; i + 1 < convs_.size(); ++i) y = norms_[i].forward(convs_[i]->forward(y));
    y = convs_.back()->forward(y);
    return norms_.back().forward(y, downsample_ ? downsample_->forward(x) : x);
  }

  void zero_last_norm() {
    torch::nn::init::zeros_(norms_.back().ptr()->named_parameters(/*recurse=*/false)["weight"]);
  }

 private:
  void add(torch::nn::Conv2d conv, const NormFactory& norm, double drop_path = 0) {
    norms_.push_back(norm.with_relu(conv->options.out_channels(), drop_path));
    convs_.push_back(std::move(conv));
    const std::string number = std::to_string(convs_.size());
    register_module("conv" + number, convs_.back());
    register_module("bn" + number, norms_.back().ptr());
  }

  std::vector<torch::nn::Conv2d> convs_;
  std::vector<NormRelu> norms_;
  torch::nn::Sequential downsample_{nullptr};
};

class ResNet : public Model {
 public:
  ResNet(const char* name, const ModelArgs& args, const ResNetOptions& options, bool bottleneck,
         const std::array<int, 4>& depths)
      : small_input_(options.small_input),
        recomputes_(args.activation_checkpointing),
        dropout_(options.dropout) {
    const int64_t channels = image_channels(name, args, 1);
    const NormFactory norm(args);
    conv1_ =
        register_module("conv1", small_input_ ? conv(channels, 64, 3) : conv(channels, 64, 7, 2));
    bn1_ = norm.with_relu(64);
    register_module("bn1", bn1_.ptr());
    const int last_block = std::reduce(depths.begin(), depths.end()) - 1;
    int64_t in = 64;
    for (size_t i = 0; i < depths.size(); ++i) {
      const int64_t width = int64_t{64} << i;
      torch::nn::Sequential stage;
      for (int k = 0; k < depths[i]; ++k) {
        const double drop_path =
            options.stochastic_depth * static_cast<double>(blocks_.size()) / last_block;
        blocks_.push_back(std::make_shared<Block>(in, width, i > 0 && k == 0 ? 2 : 1, bottleneck,
                                                  norm, drop_path));
        stage->push_back(blocks_.back());
        in = bottleneck ? 4 * width : width;
      }
      register_module("layer" + std::to_string(i + 1), stage);
    }
    fc_ = register_module("fc", torch::nn::Linear(in, args.num_classes));
    init_convolutions(*this);
    if (options.zero_init_residual) {
      for (const auto& block : blocks_) block->zero_last_norm();
    }
  }

  at::Tensor forward(at::Tensor x) override {
    x = bn1_.forward(conv1_->forward(x));
    if (!small_input_) x = at::max_pool2d(x, /*kernel_size=*/3, /*stride=*/2, /*padding=*/1);
    for (const auto& block : blocks_) x = run(block, x);
    x = at::adaptive_avg_pool2d(x, {1, 1}).flatten(1);
    return fc_->forward(at::dropout(x, dropout_, is_training()));
  }

 private:
  at::Tensor run(const std::shared_ptr<Block>& block, const at::Tensor& x) const {
    if (!recomputes_ || !at::GradMode::is_enabled()) return block->forward(x);
    return dist::checkpoint([block](const at::Tensor& input) { return block->forward(input); }, x);
  }

  bool small_input_;
  bool recomputes_;
  double dropout_;
  torch::nn::Conv2d conv1_{nullptr};
  NormRelu bn1_;
  std::vector<std::shared_ptr<Block>> blocks_;  ///< of all stages
  torch::nn::Linear fc_{nullptr};
};

}  // namespace

void ResNetOptions::describe(config::Schema<ResNetOptions>& schema) {
  schema.field("small_input", &ResNetOptions::small_input,
               "a 3x3 stem without pooling, for images of about 32 x 32");
  schema.field("zero_init_residual", &ResNetOptions::zero_init_residual,
               "start each residual branch at zero");
  schema
      .field("dropout", &ResNetOptions::dropout,
             "probability that an input of the last layer is left out in training")
      .at_least(0)
      .below(1);
  schema
      .field("stochastic_depth", &ResNetOptions::stochastic_depth,
             "probability that a sample skips the last block in training; it rises linearly from 0 "
             "in the first block")
      .at_least(0)
      .below(1);
}

std::shared_ptr<Model> resnet18(const ModelArgs& args, const ResNetOptions& options) {
  return std::make_shared<ResNet>("resnet18", args, options, /*bottleneck=*/false,
                                  std::array{2, 2, 2, 2});
}

std::shared_ptr<Model> resnet50(const ModelArgs& args, const ResNetOptions& options) {
  return std::make_shared<ResNet>("resnet50", args, options, /*bottleneck=*/true,
                                  std::array{3, 4, 6, 3});
}

}  // namespace syncbn::models
