#pragma once

#include <memory>
#include <utility>

// torch::nn::AnyModule: a batch norm layer of either kind.
#include <torch/nn/modules/container/any.h>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// A batch norm layer and the ReLU behind it, in one pass over memory where the layer can
/// (Norm::kSync).
class NormRelu {
 public:
  NormRelu() = default;
  /// @param fused `norm` is a SyncBatchNorm with fuse_relu.
  NormRelu(torch::nn::AnyModule norm, bool fused) : norm_(std::move(norm)), fused_(fused) {}

  /// @param residual added ahead of the ReLU; of the sizes of `x`, may be undefined.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {});

  /// The layer, to be registered.
  std::shared_ptr<torch::nn::Module> ptr() const { return norm_.ptr(); }

 private:
  torch::nn::AnyModule norm_;
  bool fused_ = false;
};

/// Makes the batch norm layers of a network, all of one kind.
class NormFactory {
 public:
  explicit NormFactory(const ModelArgs& args) : kind_(args.norm), group_(args.norm_group) {}

  /// A layer over `channels` of an [N, C, H, W] input; register it as `name` in its parent with
  /// register_module(name, layer.ptr()). Weight 1, bias 0.
  torch::nn::AnyModule operator()(int64_t channels) const;

  /// The same, and a ReLU.
  NormRelu with_relu(int64_t channels) const;

 private:
  torch::nn::AnyModule make(int64_t channels, bool fuse_relu) const;

  Norm kind_;
  dist::ProcessGroupPtr group_;
};

}  // namespace syncbn::models
