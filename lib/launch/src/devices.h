#pragma once

#include <string>

namespace syncbn::launch {

/// Cores that this process may run on.
int count_cores();

/// GPUs that a CUDA program would see: CUDA_VISIBLE_DEVICES, else the driver's list in /proc.
/// No CUDA library is loaded for it.
int count_gpus();

/// The entry of CUDA_VISIBLE_DEVICES that stands for device `index`, or its number.
std::string visible_gpu(int index);

}  // namespace syncbn::launch
