#pragma once

#include <memory>
#include <utility>

#include <torch/nn/modules/container/any.h>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// A batch norm layer and the ReLU behind it, in one pass over memory for Norm::kSync.
class NormRelu {
 public:
  NormRelu() = default;
  /// @param fused whether `norm` is a SyncBatchNorm with fuse_relu
  NormRelu(torch::nn::AnyModule norm, bool fused) : norm_(std::move(norm)), fused_(fused) {}

  /// @param residual undefined, or of the sizes of `x`: added before the ReLU
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {});

  /// The layer, for register_module().
  std::shared_ptr<torch::nn::Module> ptr() const { return norm_.ptr(); }

 private:
  torch::nn::AnyModule norm_;
  bool fused_ = false;
};

/// Makes the batch norm layers of a network, all of one kind.
class NormFactory {
 public:
  explicit NormFactory(const ModelArgs& args)
      : kind_(args.norm), group_(args.norm_group), timeout_(args.norm_timeout) {}

  /// A layer for an [N, C, H, W] input. Register it with register_module(name, layer.ptr()).
  torch::nn::AnyModule operator()(int64_t channels) const;

  NormRelu with_relu(int64_t channels) const;

 private:
  torch::nn::AnyModule make(int64_t channels, bool fuse_relu) const;

  Norm kind_;
  dist::ProcessGroupPtr group_;
  std::optional<std::chrono::milliseconds> timeout_;
};

}  // namespace syncbn::models
