#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/mean.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "families.h"

namespace syncbn::models {
namespace {

/// Interleaves the two halves of the channels.
at::Tensor shuffle_channels(const at::Tensor& x) {
  return x.unflatten(1, {2, x.size(1) / 2}).transpose(1, 2).flatten(1, 2);
}

/// Half of the channels go through three convolutions, the other half stays unchanged. At stride 2,
/// all channels go through both branches.
class ShuffleUnit : public torch::nn::Module {
 public:
  ShuffleUnit(int64_t in, int64_t out, int64_t stride, const NormFactory& norm)
      : branch2_(std::make_shared<Chain>()) {
    const int64_t half = out / 2;
    if (stride > 1) {
      branch1_ = register_module("branch1", std::make_shared<Chain>());
      add_separable(*branch1_, in, half, stride, norm);
    }
    branch2_->add_conv_norm(stride > 1 ? in : half, half, norm, {.kernel = 1});
    add_separable(*branch2_, half, half, stride, norm);
    register_module("branch2", branch2_);
  }

  at::Tensor forward(const at::Tensor& x) {
    if (branch1_) {
      const at::Tensor first = branch1_->forward(x);
      return shuffle_channels(at::cat({first, branch2_->forward(x)}, 1));
    }
    const auto halves = x.chunk(2, 1);
    return shuffle_channels(at::cat({halves[0], branch2_->forward(halves[1])}, 1));
  }

 private:
  /// A depthwise convolution without activation, and a 1x1 convolution.
  static void add_separable(Chain& chain, int64_t in, int64_t out, int64_t stride,
                            const NormFactory& norm) {
    chain.add_conv_norm(in, in, norm,
                        {.stride = stride, .groups = in, .activation = Activation::kNone});
    chain.add_conv_norm(in, out, norm, {.kernel = 1});
  }

  std::shared_ptr<Chain> branch1_;
  std::shared_ptr<Chain> branch2_;
};

class ShuffleNet : public Model {
 public:
  /// @param widths channels of the three stages and of the last convolution
  ShuffleNet(const std::string& name, const ModelArgs& args, const DropoutOptions& options,
             const std::array<int64_t, 4>& widths)
      : dropout_(options.dropout.value_or(0)) {
    constexpr std::array kDepths = {4, 8, 4};
    const NormFactory norm(args);
    int64_t in = 24;
    add("conv1", conv_norm(image_channels(name, args, 1), in, norm, {.stride = 2}));
    parts_.back()->add_max_pool(3, 2, 1);
    for (size_t i = 0; i < kDepths.size(); ++i) {
      auto stage = std::make_shared<Chain>(args.activation_checkpointing);
      for (int k = 0; k < kDepths[i]; ++k) {
        stage->add(std::make_shared<ShuffleUnit>(in, widths[i], k == 0 ? 2 : 1, norm));
        in = widths[i];
      }
      add("stage" + std::to_string(i + 2), stage);
    }
    add("conv5", conv_norm(in, widths.back(), norm, {.kernel = 1}));
    fc_ = register_module("fc", torch::nn::Linear(widths.back(), args.num_classes));
  }

  at::Tensor forward(at::Tensor x) override {
    for (const auto& part : parts_) x = part->forward(x);
    return fc_->forward(at::dropout(at::mean(x, {2, 3}), dropout_, is_training()));
  }

 private:
  void add(const std::string& name, const std::shared_ptr<Chain>& part) {
    parts_.push_back(register_module(name, part));
  }

  double dropout_;
  std::vector<std::shared_ptr<Chain>> parts_;
  torch::nn::Linear fc_{nullptr};
};

}  // namespace

void add_shufflenets(ModelKind::Registry& registry) {
  const auto add = [&registry](const std::string& name, const std::array<int64_t, 4>& widths) {
    add_network<DropoutOptions, ShuffleNet>(registry, name,
                                            "ShuffleNetV2 (Ma et al., arXiv:1807.11164)", widths);
  };
  add("shufflenet_v2_x0_5", {48, 96, 192, 1024});
  add("shufflenet_v2_x1_0", {116, 232, 464, 1024});
  add("shufflenet_v2_x1_5", {176, 352, 704, 1024});
  add("shufflenet_v2_x2_0", {244, 488, 976, 2048});
}

}  // namespace syncbn::models
