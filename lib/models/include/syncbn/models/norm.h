#pragma once

// torch::nn::AnyModule: a batch norm layer of either kind.
#include <torch/nn/modules/container/any.h>

#include <syncbn/models/model.h>

namespace syncbn::models {

/// Makes the batch norm layers of a network, all of one kind.
class NormFactory {
 public:
  explicit NormFactory(const ModelArgs& args) : kind_(args.norm), group_(args.norm_group) {}

  /// A layer over `channels` of an [N, C, H, W] input; register it as `name` in its parent with
  /// register_module(name, layer.ptr()). Weight 1, bias 0.
  torch::nn::AnyModule operator()(int64_t channels) const;

 private:
  Norm kind_;
  dist::ProcessGroupPtr group_;
};

}  // namespace syncbn::models
