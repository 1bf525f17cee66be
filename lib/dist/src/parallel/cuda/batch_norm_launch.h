#pragma once

#include <driver_types.h>

#include "cuda/kernel_arguments.h"

namespace syncbn::dist::detail::cuda {

// Each launches one kernel on the stream, for tensors with elements of the given type: float,
// double, half or bfloat16. None waits. The CUDA runtime keeps errors: see cudaGetLastError().

void launch(const MomentsArguments& arguments, ValueType type, cudaStream_t stream);
void launch(const MergeArguments& arguments, cudaStream_t stream);
void launch(const ForwardArguments& arguments, ValueType type, cudaStream_t stream);
void launch(const ReduceArguments& arguments, ValueType type, cudaStream_t stream);
void launch(const ElementwiseArguments& arguments, ValueType type, cudaStream_t stream);

}  // namespace syncbn::dist::detail::cuda
