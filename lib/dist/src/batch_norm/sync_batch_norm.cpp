#include <syncbn/dist/sync_batch_norm.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "batch_norm/batch_norm_function.h"
#include "groups/world.h"

namespace syncbn::dist {

SyncBatchNormImpl::SyncBatchNormImpl(const SyncBatchNormOptions& options) : options(options) {
  reset();
}

void SyncBatchNormImpl::reset() {
  const int64_t channels = options.num_features();
  if (channels < 1) {
    throw base::UserError(
        fmt::format("SyncBatchNorm: num_features must be positive, got {}", channels));
  }
  // Undefined ones are registered too: the names are the same whatever the options, as in torch.
  const bool affine = options.affine();
  weight = register_parameter("weight", affine ? at::ones({channels}) : at::Tensor(), affine);
  bias = register_parameter("bias", affine ? at::zeros({channels}) : at::Tensor(), affine);
  if (options.track_running_stats()) {
    running_mean = register_buffer("running_mean", at::zeros({channels}));
    running_var = register_buffer("running_var", at::ones({channels}));
    num_batches_tracked =
        register_buffer("num_batches_tracked", at::zeros({}, at::TensorOptions().dtype(at::kLong)));
  }
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!options.track_running_stats()) return;
  const at::NoGradGuard no_grad;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (!options.affine()) return;
  const at::NoGradGuard no_grad;
  weight.fill_(1);
  bias.zero_();
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format(
      "syncbn::dist::SyncBatchNorm({}, eps={}, momentum={}, affine={}, "
      "track_running_stats={})",
      options.num_features(), options.eps(),
      options.momentum() ? fmt::format("{}", *options.momentum()) : "none", options.affine(),
      options.track_running_stats());
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  detail::BatchNormArguments arguments{.input = input,
                                       .weight = weight,
                                       .bias = bias,
                                       .running_mean = running_mean,
                                       .running_var = running_var,
                                       .momentum = 0,
                                       .eps = options.eps()};
  detail::check_input(arguments);
  ProcessGroupPtr group;
  if (is_training()) {
    group = detail::statistics_group(options.process_group());
    const bool alone = !group || group->getSize() == 1;
    if (alone && input.numel() == input.size(1)) {
      throw base::UserError(fmt::format(
          "SyncBatchNorm: one value per channel (input {}) has no variance to train with; use a "
          "larger batch",
          c10::str(input.sizes())));
    }
    if (alone) group = nullptr;
    if (num_batches_tracked.defined()) {
      num_batches_tracked.add_(1);
      // The weight of this batch; without a momentum, all batches weigh the same.
      arguments.momentum = options.momentum()
                               ? *options.momentum()
                               : 1.0 / static_cast<double>(num_batches_tracked.item<int64_t>());
    }
  }
  if (group) return detail::sync_batch_norm(arguments, group);
  const bool use_batch = is_training() || !running_mean.defined();
  return at::batch_norm(input, weight, bias, running_mean, running_var, use_batch,
                        arguments.momentum, options.eps(), at::globalContext().userEnabledCuDNN());
}

}  // namespace syncbn::dist
