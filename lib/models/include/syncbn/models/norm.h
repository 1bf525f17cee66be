#pragma once

#include <memory>
#include <utility>

#include <torch/nn/modules/container/any.h>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// A batch norm layer followed by ReLU; fused into one pass over memory for Norm::kSync without
/// drop_path.
class NormRelu {
 public:
  NormRelu() = default;
  /// @param fused whether `norm` is a SyncBatchNorm with fuse_relu
  /// @param drop_path stochastic depth (Huang et al., arXiv:1603.09382): in training, the
  ///   probability that only the residual of a sample remains; must be 0 if `fused`
  NormRelu(torch::nn::AnyModule norm, bool fused, double drop_path = 0)
      : norm_(std::move(norm)), fused_(fused), drop_path_(drop_path) {}

  /// @param residual undefined, or of the sizes of `x`: added before the ReLU
  /// @param drops whether to apply `drop_path`: whether the network is training. The layer's own
  ///   mode does not tell, because frozen statistics put it into evaluation mode.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {}, bool drops = false);

  /// The layer, for register_module().
  std::shared_ptr<torch::nn::Module> ptr() const { return norm_.ptr(); }

 private:
  torch::nn::AnyModule norm_;
  bool fused_ = false;
  double drop_path_ = 0;
};

/// Makes the batch norm layers of a network, all of the same kind.
class NormFactory {
 public:
  /// @param eps, momentum as in torch::nn::BatchNorm2d
  explicit NormFactory(const ModelArgs& args, double eps = 1e-5, double momentum = 0.1)
      : args_(args), eps_(eps), momentum_(momentum) {}

  /// A layer for an [N, C, H, W] input. Register it with register_module(name, layer.ptr()).
  torch::nn::AnyModule operator()(int64_t channels) const {
    return make(channels, /*fuse_relu=*/false);
  }

  /// @param drop_path see NormRelu
  NormRelu with_relu(int64_t channels, double drop_path = 0) const;

 private:
  torch::nn::AnyModule make(int64_t channels, bool fuse_relu) const;

  ModelArgs args_;
  double eps_;
  double momentum_;
};

}  // namespace syncbn::models
