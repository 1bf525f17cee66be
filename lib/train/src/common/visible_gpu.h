#pragma once

#include <cstdint>

namespace syncbn::train {

/// Restricts this process to one of the GPUs that it sees, through CUDA_VISIBLE_DEVICES. Call it
/// before CUDA is used and before there are threads.
/// @throws base::UserError if the host has several ranks or the process sees fewer GPUs
void see_only_gpu(int64_t index);

}  // namespace syncbn::train
