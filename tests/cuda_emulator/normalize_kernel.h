// The CUDA kernel that normalises images, run by the emulator on host memory.
#pragma once

#include <cstdint>

#include "cuda/normalize_arguments.h"

namespace syncbn::data::cuda {

void emulate(const NormalizeArguments& arguments, ImageType type, uint64_t seed = 0);

}  // namespace syncbn::data::cuda
