#pragma once

#include <ATen/core/Tensor.h>

#include "batch_norm/exchange.h"

// Replicas of torch::nn::parallel::data_parallel: clones of a module that run in threads.

namespace syncbn::dist::detail {

/// Whether the parameter belongs to a replica.
bool is_replica(const at::Tensor& parameter);

/// The parameter that the replica's was copied from; undefined if the parameter is no replica's, or
/// if the original is frozen.
at::Tensor original_of(const at::Tensor& parameter);

/// @throws base::UserError always.
[[noreturn]] void throw_is_replica(const LayerName& layer);

}  // namespace syncbn::dist::detail
