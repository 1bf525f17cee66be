#pragma once

#include <ATen/core/Tensor.h>

#include <syncbn/dist/collectives.h>

namespace syncbn::dist::detail {

/// Every rank's row: [1, n] in, [W, n] out, in the order of ranks. One collective.
at::Tensor gather_rows(const at::Tensor& row, const ProcessGroupPtr& group,
                       Timeout timeout = std::nullopt);

/// The sum of every rank's row: [1, n] in, [n] out, the same bits on each rank. One collective.
at::Tensor sum_rows(const at::Tensor& row, const ProcessGroupPtr& group,
                    Timeout timeout = std::nullopt);

}  // namespace syncbn::dist::detail
