#include <syncbn/models/resnet.h>

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/max_pool2d.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <string>

#include <syncbn/models/norm.h>

#include "init.h"

namespace syncbn::models {
namespace {

// Modules are made and registered in torchvision's order: registration sets the order of
// parameters, making sets the order of random draws, so that one seed gives one set of weights.

torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel)
                               .stride(stride)
                               .padding((kernel - 1) / 2)
                               .bias(false));
}

/// The shortcut of a block that changes the shape.
class DownsampleImpl : public torch::nn::Module {
 public:
  DownsampleImpl(int64_t in, int64_t out, int64_t stride, const NormFactory& norm)
      : conv_(register_module("0", conv(in, out, 1, stride))), norm_(norm(out)) {
    register_module("1", norm_.ptr());
  }
  at::Tensor forward(const at::Tensor& x) { return norm_.forward(conv_->forward(x)); }

 private:
  torch::nn::Conv2d conv_;
  torch::nn::AnyModule norm_;
};
TORCH_MODULE(Downsample);

struct BlockShape {
  int64_t in;      ///< channels that come in
  int64_t width;   ///< channels of the 3x3 convolutions
  int64_t stride;  ///< of the whole block
};

/// A residual block: convolutions, each with its batch norm, around which the input is led.
class Block : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (size_t i = 0; i + 1 < convs_.size(); ++i) y = norms_[i].forward(convs_[i]->forward(y));
    y = convs_.back()->forward(y);
    return norms_.back().forward(y, downsample_ ? downsample_->forward(x) : x);
  }

  void zero_last_norm() {
    torch::nn::init::zeros_(norms_.back().ptr()->named_parameters(/*recurse=*/false)["weight"]);
  }

 protected:
  /// Of the constructor of a kind of block, before its convolutions are made.
  void make_downsample(const BlockShape& shape, int64_t out, const NormFactory& norm) {
    if (shape.stride == 1 && shape.in == out) return;
    downsample_ = Downsample(shape.in, out, shape.stride, norm);
  }
  void add(torch::nn::Conv2d conv, const NormFactory& norm) {
    norms_.push_back(norm.with_relu(conv->options.out_channels()));
    convs_.push_back(std::move(conv));
    const std::string number = std::to_string(convs_.size());
    register_module("conv" + number, convs_.back());
    register_module("bn" + number, norms_.back().ptr());
  }
  void register_downsample() {
    if (downsample_) register_module("downsample", downsample_);
  }

 private:
  std::vector<torch::nn::Conv2d> convs_;
  std::vector<NormRelu> norms_;
  Downsample downsample_{nullptr};
};

class BasicBlock : public Block {
 public:
  static constexpr int64_t kExpansion = 1;

  BasicBlock(const BlockShape& shape, const NormFactory& norm) {
    make_downsample(shape, shape.width, norm);
    add(conv(shape.in, shape.width, 3, shape.stride), norm);
    add(conv(shape.width, shape.width, 3), norm);
    register_downsample();
  }
};

class Bottleneck : public Block {
 public:
  static constexpr int64_t kExpansion = 4;

  Bottleneck(const BlockShape& shape, const NormFactory& norm) {
    const int64_t out = shape.width * kExpansion;
    make_downsample(shape, out, norm);
    add(conv(shape.in, shape.width, 1), norm);
    add(conv(shape.width, shape.width, 3, shape.stride), norm);
    add(conv(shape.width, out, 1), norm);
    register_downsample();
  }
};

/// Blocks in a row, named by their number.
class StageImpl : public torch::nn::Module {
 public:
  void add(std::shared_ptr<Block> block) {
    blocks_.push_back(register_module(std::to_string(blocks_.size()), std::move(block)));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks_) x = block->forward(x);
    return x;
  }
  const std::vector<std::shared_ptr<Block>>& blocks() const { return blocks_; }

 private:
  std::vector<std::shared_ptr<Block>> blocks_;
};
TORCH_MODULE(Stage);

template <class BlockKind>
class ResNet : public Model {
 public:
  ResNet(const char* name, const ModelArgs& args, const ResNetOptions& options,
         const std::array<int, 4>& depths)
      : small_input_(options.small_input) {
    const int64_t channels = image_shape(name, args, 1).channels;
    const NormFactory norm(args);
    conv1_ =
        register_module("conv1", small_input_ ? conv(channels, 64, 3) : conv(channels, 64, 7, 2));
    bn1_ = norm.with_relu(64);
    register_module("bn1", bn1_.ptr());
    int64_t in = 64;
    for (size_t i = 0; i < depths.size(); ++i) {
      const int64_t width = int64_t{64} << i;
      for (int k = 0; k < depths[i]; ++k) {
        const BlockShape shape{.in = in, .width = width, .stride = i > 0 && k == 0 ? 2 : 1};
        stages_[i]->add(std::make_shared<BlockKind>(shape, norm));
        in = width * BlockKind::kExpansion;
      }
      register_module("layer" + std::to_string(i + 1), stages_[i]);
    }
    fc_ = register_module("fc", torch::nn::Linear(in, args.num_classes));
    init_convolutions(*this);
    if (options.zero_init_residual) zero_residuals();
  }

  at::Tensor forward(at::Tensor x) override {
    x = bn1_.forward(conv1_->forward(x));
    if (!small_input_) x = at::max_pool2d(x, /*kernel_size=*/3, /*stride=*/2, /*padding=*/1);
    for (auto& stage : stages_) x = stage->forward(x);
    return fc_->forward(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }

 private:
  void zero_residuals() {
    for (auto& stage : stages_) {
      for (const auto& block : stage->blocks()) block->zero_last_norm();
    }
  }

  bool small_input_;
  torch::nn::Conv2d conv1_{nullptr};
  NormRelu bn1_;
  std::array<Stage, 4> stages_;
  torch::nn::Linear fc_{nullptr};
};

}  // namespace

void ResNetOptions::describe(config::Schema<ResNetOptions>& schema) {
  schema.field("small_input", &ResNetOptions::small_input,
               "a 3x3 stem without pooling, for images of about 32 x 32");
  schema.field("zero_init_residual", &ResNetOptions::zero_init_residual,
               "start each residual branch at zero");
}

std::shared_ptr<Model> resnet18(const ModelArgs& args, const ResNetOptions& options) {
  return std::make_shared<ResNet<BasicBlock>>("resnet18", args, options, std::array{2, 2, 2, 2});
}

std::shared_ptr<Model> resnet50(const ModelArgs& args, const ResNetOptions& options) {
  return std::make_shared<ResNet<Bottleneck>>("resnet50", args, options, std::array{3, 4, 6, 3});
}

}  // namespace syncbn::models
