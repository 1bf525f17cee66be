// Runs CUDA kernels on the host, in one thread, in an order that a seed chooses.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "cuda_emulator/device.h"

// Threads are fibers that run from one synchronisation to the next; blocks and warps take turns at
// random. Threads of a warp do not run in lockstep. The emulator finds missing barriers, barriers
// that not all threads reach, reads of unset shared memory, and under AddressSanitizer accesses
// outside a tensor. It does not show the device's memory model (a missing __threadfence), its
// rounding of fused operations, or its speed.

namespace cuda_emulator {

struct Launch {
  dim3 grid, block;
  uint64_t seed = 0;
  /// Runs one block only, so that a test can look at the end of a large grid.
  std::optional<uint3> only = {};
};

/// @param shared_bytes size of each block's shared memory, which is filled with 0xFF
/// @param body runs in each thread with the shared memory of its block
/// @throws std::logic_error if threads wait for others that never arrive; any exception of body
void run(const Launch& launch, size_t shared_bytes, const std::function<void(void*)>& body);

/// For a kernel whose shared memory is one object of type Shared.
template <class Shared, class Body>
void run(const Launch& launch, Body body) {
  run(launch, sizeof(Shared), [&](void* shared) { body(*static_cast<Shared*>(shared)); });
}

}  // namespace cuda_emulator
