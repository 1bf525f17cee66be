#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include <syncbn/dist/process_group.h>

#include "batch_norm/exchange.h"

namespace syncbn::dist::detail {

/// What aten::batch_norm takes, less what cuDNN wants, and what is fused with it. Undefined tensors
/// stand for None.
struct BatchNormArguments {
  at::Tensor input;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;         ///< updated in place
  at::Tensor running_var;          ///< updated in place
  at::Tensor num_batches_tracked;  ///< counted up
  std::optional<double> momentum;  ///< nullopt: 1 / num_batches_tracked
  double eps = 1e-5;
  at::Tensor residual;  ///< added to what is normalised
  bool relu = false;    ///< and then negative values become 0
};

/// Whose arguments they are, and which ranks share the statistics.
struct BatchNormLayer {
  std::shared_ptr<const LayerName> name;
  ProcessGroupPtr group;  ///< null: this rank alone
  Timeout timeout;
};

/// @throws base::UserError for an input that the layer cannot take: dimensions, channels, dtype,
///   device.
void check_input(const BatchNormArguments& arguments);

struct BatchNormResult {
  at::Tensor output;
  /// Whether the batch counted: not when all ranks are empty, in checkpoint()'s recomputation, nor
  /// in update_bn_stats().
  bool updated = false;
};

/// Normalises over the batches of all ranks of the layer's group, with autograd of any order; the
/// running statistics are updated once. Collective: every rank of the group calls it.
/// @throws base::UserError for an input that cannot be normalised, and when all ranks together have
///   one value a channel.
BatchNormResult sync_batch_norm(const BatchNormArguments& arguments, const BatchNormLayer& layer);

}  // namespace syncbn::dist::detail
