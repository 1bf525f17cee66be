#pragma once

// The parts of CUDA's language that the kernels use. For a host compiler, the emulator in
// tests/cuda_emulator defines them under the same names.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef __CUDACC__
#include "cuda_emulator/device.h"
#endif
