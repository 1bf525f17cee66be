#pragma once

#include <driver_types.h>

#include "cuda/normalize_arguments.h"

namespace syncbn::data::cuda {

/// Launches one kernel on the stream: (images - mean) / std in the type and layout of the output, 0
/// outside of an image. Does not wait. Errors stay with the CUDA runtime: see cudaGetLastError().
void launch(const NormalizeArguments& arguments, ImageType type, cudaStream_t stream);

}  // namespace syncbn::data::cuda
