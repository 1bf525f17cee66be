#include <syncbn/dist/sync_batch_norm.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <cmath>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ParallelGuard.h>

#include "batch_norm/batch_norm_function.h"
#include "batch_norm/convert.h"
#include "batch_norm/named_layers.h"
#include "batch_norm/replica_scope.h"
#include "groups/world.h"
#include "transport/timeouts.h"

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
  if (!(options.eps() >= 0) || !std::isfinite(options.eps())) {
    throw base::UserError(
        fmt::format("SyncBatchNorm: eps must be a number from 0 on, got {}", options.eps()));
  }
  const double momentum = options.momentum().value_or(0);
  if (!(momentum >= 0 && momentum <= 1)) {
    throw base::UserError(
        fmt::format("SyncBatchNorm: momentum must be from 0 to 1, or none, got {}", momentum));
  }
  options.sync_timeout(detail::checked(options.sync_timeout(), "SyncBatchNorm: sync_timeout"));
  // clone() calls this: the clone is another layer with the same name.
  name_ = std::make_shared<detail::LayerName>(
      detail::LayerName{.given = name_ ? name_->given : options.name()});
  // Undefined tensors are registered as well, so that names do not depend on options, as in torch.
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
  detail::print_sync_batch_norm(stream, options);
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input, const at::Tensor& residual) {
  detail::BatchNormArguments arguments{.input = input,
                                       .weight = detail::ReplicaScope::own(weight),
                                       .bias = detail::ReplicaScope::own(bias),
                                       .running_mean = detail::ReplicaScope::own(running_mean),
                                       .running_var = detail::ReplicaScope::own(running_var),
                                       .num_batches_tracked = num_batches_tracked,
                                       .momentum = options.momentum(),
                                       .eps = options.eps(),
                                       .residual = residual,
                                       .relu = options.fuse_relu()};
  detail::check_input(arguments);
  if (is_training()) {
    // data_parallel runs replicas inside at::parallel_for, where no layer may exchange.
    if (c10::ParallelGuard::is_enabled() || detail::is_replica(weight)) {
      detail::throw_is_replica(*name_);
    }
    return detail::sync_batch_norm(
               arguments, *name_, [this] { return detail::statistics_group_of(options); },
               options.sync_timeout())
        .output;
  }
  at::Tensor output = at::batch_norm(input, weight, bias, running_mean, running_var,
                                     /*training=*/!running_mean.defined(), /*momentum=*/0,
                                     options.eps(), at::globalContext().userEnabledCuDNN());
  // In place: the backward of at::batch_norm does not use its output.
  if (residual.defined()) output.add_(residual);
  return options.fuse_relu() ? output.relu_() : output;
}

namespace detail {

NormTensors norm_tensors(const torch::nn::Module& module) {
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto buffers = module.named_buffers(/*recurse=*/false);
  const auto tensor = [](const auto& all, const char* name) {
    const at::Tensor* const found = all.find(name);
    return found == nullptr ? at::Tensor() : *found;
  };
  return {tensor(buffers, "running_mean"), tensor(buffers, "running_var"),
          tensor(buffers, "num_batches_tracked"), tensor(parameters, "weight")};
}

void name_layers(const torch::nn::Module& module) {
  for_each_named_module(module, [](const std::string& name, const torch::nn::Module& one) {
    const auto* layer = one.as<SyncBatchNormImpl>();
    if (layer != nullptr && layer->options.name().empty()) layer->name_->given = name;
  });
}

ProcessGroupPtr statistics_group_of(const SyncBatchNormOptions& options) {
  if (options.group_size() == 0) return statistics_group(options.process_group());
  if (options.process_group()) {
    throw base::UserError(
        fmt::format("SyncBatchNorm: both process_group and group_size ({}) are given; group_size "
                    "splits the default group's ranks",
                    options.group_size()));
  }
  return statistics_subgroup(options.group_size());
}

}  // namespace detail
}  // namespace syncbn::dist
