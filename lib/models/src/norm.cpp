#include <syncbn/models/norm.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>

#include <syncbn/base/error.h>
#include <syncbn/dist/batch_norm.h>
#include <syncbn/dist/sync_batch_norm.h>

#include "blocks.h"

namespace syncbn::models {
namespace {

/// torch's layer, with advice in the error for inputs without a variance.
class LocalNorm : public dist::BatchNorm2dImpl {
 public:
  using dist::BatchNorm2dImpl::BatchNorm2dImpl;

  at::Tensor forward(const at::Tensor& x) {
    try {
      return BatchNorm2dImpl::forward(x);
    } catch (const c10::Error& error) {
      const std::string_view what = error.what_without_backtrace();
      if (what.find("more than 1 value per channel") == what.npos) throw;
      throw base::UserError(fmt::format(
          "batch norm: one value per channel (input [{}]) has no variance to train with; use a "
          "larger batch, loader.drop_last if only the last batch is that small, or sync_batchnorm",
          fmt::join(x.sizes(), ", ")));
    }
  }
};

}  // namespace

at::Tensor NormRelu::forward(const at::Tensor& x, const at::Tensor& residual, bool drops) {
  if (fused_) return norm_.forward(x, residual);
  at::Tensor y = norm_.forward(x);
  if (drops && drop_path_ > 0) y = drop_path(y, drop_path_);
  if (residual.defined()) y.add_(residual);
  return y.relu_();
}

NormRelu NormFactory::with_relu(int64_t channels, double drop_path) const {
  const bool fused = args_.norm == Norm::kSync && drop_path == 0;
  return {make(channels, fused), fused, drop_path};
}

torch::nn::AnyModule NormFactory::make(int64_t channels, bool fuse_relu) const {
  if (args_.norm == Norm::kLocal) {
    return torch::nn::AnyModule(std::make_shared<LocalNorm>(
        torch::nn::BatchNorm2dOptions(channels).eps(eps_).momentum(momentum_)));
  }
  return torch::nn::AnyModule(dist::SyncBatchNorm(dist::SyncBatchNormOptions(channels)
                                                      .eps(eps_)
                                                      .momentum(momentum_)
                                                      .process_group(args_.norm_group)
                                                      .sync_timeout(args_.norm_timeout)
                                                      .fuse_relu(fuse_relu)));
}

}  // namespace syncbn::models
