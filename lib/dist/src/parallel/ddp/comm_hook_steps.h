#pragma once

#include <syncbn/dist/comm_hooks.h>

namespace syncbn::dist::detail {

/// Starts an all-reduce of `tensor` over the group, in place.
c10::intrusive_ptr<c10d::Work> start_all_reduce(const at::Tensor& tensor,
                                                const ProcessGroupPtr& group,
                                                c10d::ReduceOp op = c10d::ReduceOp::SUM);

/// Starts to average `buffer` over the group, in place.
FuturePtr mean_of(const at::Tensor& buffer, const ProcessGroupPtr& group);

}  // namespace syncbn::dist::detail
