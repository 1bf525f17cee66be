#pragma once

#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include <syncbn/dist/process_group.h>

#include "batch_norm/exchange.h"

namespace syncbn::dist::detail {

/// Arguments of aten::batch_norm and of the operations fused with it. Undefined tensors mean None.
struct BatchNormArguments {
  at::Tensor input;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;         ///< updated in place
  at::Tensor running_var;          ///< updated in place
  at::Tensor num_batches_tracked;  ///< incremented
  std::optional<double> momentum;  ///< nullopt: 1 / num_batches_tracked
  double eps = 1e-5;
  at::Tensor residual;  ///< added to the normalised values
  bool relu = false;    ///< applied after that
};

/// @throws base::UserError if the input's dimensions, channels, dtype or device do not fit.
void check_input(const BatchNormArguments& arguments);

struct BatchNormResult {
  at::Tensor output;
  /// Whether the running statistics were updated. They are not when all ranks are empty, in
  /// checkpoint()'s recomputation, and in update_bn_stats().
  bool updated = false;
};

/// Returns the group whose ranks share a layer's statistics; null: ranks exchange nothing. Only one
/// of a layer's replicas calls it, because it may create the group. If it is empty, replicas share
/// nothing either.
using GetGroup = std::function<ProcessGroupPtr()>;

/// Normalises over the batches of all ranks of the layer's group, with gradients of any order, and
/// updates the running statistics. Collective: every rank of the group calls it. In DataParallel,
/// normalises over the batches of all replicas as well, and every replica must call it.
/// @throws base::UserError as check_input() does, and for one value per channel on all ranks; what
///   ReplicaTeam::meet() throws.
BatchNormResult sync_batch_norm(const BatchNormArguments& arguments, const LayerName& layer,
                                const GetGroup& group, Timeout timeout);

}  // namespace syncbn::dist::detail
