#include <syncbn/models/norm.h>

#include <torch/nn/modules/batchnorm.h>

#include <syncbn/dist/sync_batch_norm.h>

#include "blocks.h"

namespace syncbn::models {

at::Tensor NormRelu::forward(const at::Tensor& x, const at::Tensor& residual, bool drops) {
  if (fused_) return norm_.forward(x, residual);
  at::Tensor y = norm_.forward(x);
  if (drops && drop_path_ > 0) y = drop_path(y, drop_path_);
  if (residual.defined()) y.add_(residual);
  return y.relu_();
}

torch::nn::AnyModule NormFactory::operator()(int64_t channels) const {
  return make(channels, /*fuse_relu=*/false);
}

NormRelu NormFactory::with_relu(int64_t channels, double drop_path) const {
  const bool fused = kind_ == Norm::kSync && drop_path == 0;
  return {make(channels, fused), fused, drop_path};
}

torch::nn::AnyModule NormFactory::make(int64_t channels, bool fuse_relu) const {
  if (kind_ == Norm::kLocal) {
    return torch::nn::AnyModule(torch::nn::BatchNorm2d(
        torch::nn::BatchNorm2dOptions(channels).eps(eps_).momentum(momentum_)));
  }
  return torch::nn::AnyModule(dist::SyncBatchNorm(dist::SyncBatchNormOptions(channels)
                                                      .eps(eps_)
                                                      .momentum(momentum_)
                                                      .process_group(group_)
                                                      .sync_timeout(timeout_)
                                                      .fuse_relu(fuse_relu)));
}

}  // namespace syncbn::models
