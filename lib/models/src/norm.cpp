#include <syncbn/models/norm.h>

#include <torch/nn/modules/batchnorm.h>

#include <syncbn/dist/sync_batch_norm.h>

namespace syncbn::models {

torch::nn::AnyModule NormFactory::operator()(int64_t channels) const {
  if (kind_ == Norm::kSync) {
    return torch::nn::AnyModule(
        dist::SyncBatchNorm(dist::SyncBatchNormOptions(channels).process_group(group_)));
  }
  return torch::nn::AnyModule(torch::nn::BatchNorm2d(channels));
}

}  // namespace syncbn::models
