#include <syncbn/models/norm.h>

#include <ATen/ops/empty.h>
#include <torch/nn/modules/batchnorm.h>

#include <syncbn/dist/sync_batch_norm.h>

namespace syncbn::models {

at::Tensor NormRelu::forward(const at::Tensor& x, const at::Tensor& residual) {
  if (fused_) return norm_.forward(x, residual);
  at::Tensor y = norm_.forward(x);
  if (drop_path_ > 0 && norm_.ptr()->is_training()) {
    const double kept = 1 - drop_path_;
    const at::Tensor mask = at::empty({y.size(0), 1, 1, 1}, y.options().requires_grad(false));
    y = y * mask.bernoulli_(kept).div_(kept);
  }
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
  if (kind_ == Norm::kLocal) return torch::nn::AnyModule(torch::nn::BatchNorm2d(channels));
  return torch::nn::AnyModule(dist::SyncBatchNorm(
      dist::SyncBatchNormOptions(channels).process_group(group_).sync_timeout(timeout_).fuse_relu(
          fuse_relu)));
}

}  // namespace syncbn::models
