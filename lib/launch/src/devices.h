#pragma once

#include <string>

namespace syncbn::launch {

/// Cores that this process may run on.
int count_cores();

/// GPUs that a CUDA program would see: CUDA_VISIBLE_DEVICES, else the driver's list in /proc.
/// No CUDA library is loaded for it.
int count_gpus();

/// The entry of CUDA_VISIBLE_DEVICES that stands for device `index`; its number where that variable
/// is not set. @throws base::UserError when the list is too short.
std::string visible_gpu(int index);

}  // namespace syncbn::launch
