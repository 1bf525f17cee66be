// The CUDA kernels of batch norm, run by the emulator on memory of the host.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/kernel_arguments.h"
#include "cuda_emulator/emulator.h"

namespace syncbn::dist::detail::cuda {

struct Schedule {
  uint64_t seed = 0;
  std::optional<uint3> only = {};  ///< the only block to run
};

void emulate(const MomentsArguments& arguments, ValueType type, const Schedule& schedule = {});
void emulate(const MergeArguments& arguments, const Schedule& schedule = {});
void emulate(const ForwardArguments& arguments, ValueType type, const Schedule& schedule = {});
void emulate(const ReduceArguments& arguments, ValueType type, const Schedule& schedule = {});
void emulate(const ElementwiseArguments& arguments, ValueType type, const Schedule& schedule = {});

}  // namespace syncbn::dist::detail::cuda
