// The arithmetic of reductions, in the order of ranks.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace fake_nccl {

/// Bytes of one element.
size_t size_of(ncclDataType_t type);

/// Whether elements of this type can be reduced; 8-bit floats cannot, here.
bool is_reducible(ncclDataType_t type);

/// Writes the reduction of `count` elements of each of `parts` to `into`, which may be one of them.
void reduce(void* into, const std::vector<const void*>& parts, size_t count, ncclDataType_t type,
            ncclRedOp_t operation);

}  // namespace fake_nccl
