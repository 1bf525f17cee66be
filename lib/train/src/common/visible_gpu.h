#pragma once

#include <cstdint>

namespace syncbn::train {

/// Leaves this process one GPU of those that it sees, by CUDA_VISIBLE_DEVICES. To be called before
/// CUDA is used, and before there are threads.
/// @throws base::UserError where the host has several ranks, or fewer GPUs are visible.
void see_only_gpu(int64_t index);

}  // namespace syncbn::train
