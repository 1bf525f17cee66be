// The CUDA kernel that normalizes images, run by the emulator on memory of the host.
#pragma once

#include <cstdint>

#include "cuda/normalize_arguments.h"

namespace syncbn::data::cuda {

void emulate(const NormalizeArguments& arguments, ImageType type, uint64_t seed = 0);

}  // namespace syncbn::data::cuda
