#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <syncbn/dist/collectives.h>

#include "transport/transport.h"

namespace syncbn::dist::detail {

/// Every rank's row: takes [1, n], returns [W, n] in the order of ranks. One collective.
at::Tensor gather_rows(const at::Tensor& row, const ProcessGroupPtr& group,
                       Timeout timeout = std::nullopt);

/// Starts gather_rows() into `all`, contiguous [W, n]. Ranks may mix both functions.
/// @param is_awaited the caller waits at once, which allows a faster path that waits here.
/// @return null if there is nothing to wait for.
c10::intrusive_ptr<c10d::Work> start_gather_rows(const at::Tensor& row, const at::Tensor& all,
                                                 const ProcessGroupPtr& group, Timeout timeout,
                                                 bool is_awaited);

/// Whether merge_in_tree() is faster than gather_rows(): on the CPU, unless rows reach all ranks in
/// one hop. Equal on all ranks. False for a group that this library did not make.
bool merges_in_tree(const at::Tensor& row, const ProcessGroupPtr& group);

/// Returns the merged row of all ranks, [1, n], with equal bits on all ranks. One collective.
/// @param row [1, n], contiguous, for which merges_in_tree() is true; may be overwritten.
at::Tensor merge_in_tree(const at::Tensor& row, const ProcessGroupPtr& group, MergeRows merge,
                         Timeout timeout = std::nullopt);

/// The sum of all rows, [1, n], with equal bits on all ranks. One collective.
/// @param row is overwritten
at::Tensor sum_rows(const at::Tensor& row, const ProcessGroupPtr& group,
                    Timeout timeout = std::nullopt);

/// gather_rows() of a few values on the CPU over send and recv, so that an error names the rank
/// whose row is missing. @throws base::UnavailableError naming the rank and `what`.
at::Tensor gather_one_by_one(const at::Tensor& row, const ProcessGroupPtr& group, Timeout timeout,
                             const std::string& what);

}  // namespace syncbn::dist::detail
