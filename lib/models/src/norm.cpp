#include <syncbn/models/norm.h>

#include <torch/nn/modules/batchnorm.h>

#include <syncbn/dist/sync_batch_norm.h>

namespace syncbn::models {

at::Tensor NormRelu::forward(const at::Tensor& x, const at::Tensor& residual) {
  if (fused_) return norm_.forward(x, residual);
  at::Tensor y = norm_.forward(x);
  if (residual.defined()) y.add_(residual);
  return y.relu_();
}

torch::nn::AnyModule NormFactory::operator()(int64_t channels) const {
  return make(channels, /*fuse_relu=*/false);
}

NormRelu NormFactory::with_relu(int64_t channels) const {
  const bool fused = kind_ == Norm::kSync;
  return {make(channels, fused), fused};
}

torch::nn::AnyModule NormFactory::make(int64_t channels, bool fuse_relu) const {
  if (kind_ == Norm::kLocal) return torch::nn::AnyModule(torch::nn::BatchNorm2d(channels));
  return torch::nn::AnyModule(dist::SyncBatchNorm(
      dist::SyncBatchNormOptions(channels).process_group(group_).sync_timeout(timeout_).fuse_relu(
          fuse_relu)));
}

}  // namespace syncbn::models
