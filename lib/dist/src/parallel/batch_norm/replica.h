#pragma once

#include <ATen/core/Tensor.h>

#include "batch_norm/exchange.h"

namespace syncbn::dist::detail {

/// Whether a parameter is a replica's, inside torch::nn::parallel::data_parallel.
bool is_replica(const at::Tensor& parameter);

/// The parameter that a replica's stands for; undefined for one that is no replica's, or whose
/// original is frozen.
at::Tensor original_of(const at::Tensor& parameter);

/// @throws base::UserError inside torch::nn::parallel::data_parallel.
/// @param weight of the layer, or undefined
void refuse_replicas(const at::Tensor& weight, const LayerName& layer);

/// The same without looking.
[[noreturn]] void throw_is_replica(const LayerName& layer);

}  // namespace syncbn::dist::detail
