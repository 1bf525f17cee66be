#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "transport/reduce_loops.h"

namespace syncbn::dist::detail::shm {

/// Null for what shared memory does not reduce: bitwise operations, AVG of integers, and complex
/// and other rare dtypes. Half-precision values are reduced in float32 and rounded once.
Reduce find_reduce(at::ScalarType type, c10d::ReduceOp::RedOpType op);

}  // namespace syncbn::dist::detail::shm
