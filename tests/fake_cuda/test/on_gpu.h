#pragma once

#include <cstdlib>

#include <ATen/core/Tensor.h>

namespace fake_cuda {

const at::TensorOptions kOnGpu = at::TensorOptions().device(at::kCUDA, 0);

/// Makes streams lag. Call it before the first call of CUDA in this process.
inline void lag(const char* seed) {
  ::setenv("FAKE_CUDA_SEED", seed, 1);
}

}  // namespace fake_cuda
