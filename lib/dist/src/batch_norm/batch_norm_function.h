#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <syncbn/dist/process_group.h>

namespace syncbn::dist::detail {

/// What aten::batch_norm takes, less what cuDNN wants. Undefined tensors stand for None.
struct BatchNormArguments {
  at::Tensor input;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;  ///< updated in place
  at::Tensor running_var;   ///< updated in place
  double momentum = 0.1;
  double eps = 1e-5;
};

/// @throws base::UserError for an input that the layer cannot take: dimensions, channels, dtype,
///   device.
void check_input(const BatchNormArguments& arguments);

/// Normalises over the batches of all ranks of `group` (which must not be null), with autograd; the
/// running statistics are updated once. Collective: every rank of the group calls it.
/// @throws base::UserError for an input that cannot be normalised, and when all ranks together have
///   one value a channel.
at::Tensor sync_batch_norm(const BatchNormArguments& arguments, const ProcessGroupPtr& group);

}  // namespace syncbn::dist::detail
