#pragma once

// The words of CUDA that the kernels use. A host compiler gets their meaning from the emulator of
// tests/cuda_emulator, under the same names.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef __CUDACC__
#include "cuda_emulator/device.h"
#endif
