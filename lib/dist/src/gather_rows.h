#pragma once

#include <ATen/core/Tensor.h>

#include <syncbn/dist/collectives.h>

namespace syncbn::dist::detail {

/// Every rank's row: [1, n] in, [W, n] out, in the order of ranks. One collective.
at::Tensor gather_rows(const at::Tensor& row, const ProcessGroupPtr& group,
                       Timeout timeout = std::nullopt);

/// Whether gather_rows() takes one hop between ranks for such a row: then gathering all rows and
/// adding them up is quicker than Gloo's all-reduce with its 2 (W - 1) hops.
bool gathers_in_one_hop(const at::Tensor& row, const ProcessGroupPtr& group);

}  // namespace syncbn::dist::detail
