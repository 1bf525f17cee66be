#pragma once

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

/// A float64 count on the GPU as the int32 vector of one element that ATen's
/// batch_norm_backward_elemt sums up, without a round trip over the host. Counts above 2^31 - 1
/// saturate.
at::Tensor count_to_int(const at::Tensor& count);

}  // namespace syncbn::dist::detail
