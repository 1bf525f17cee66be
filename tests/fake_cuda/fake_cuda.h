// What the fake CUDA devices offer beyond CUDA's interface, to the stand-ins for NCCL and ATen's
// operators, and to tests. All functions are thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "counts.h"

namespace fake_cuda {

using Work = std::function<void()>;

/// Where the bytes of device memory really are; returns a host pointer unchanged. Device pointers
/// are in pages without access, so host code that dereferences one crashes, as with a real GPU.
void* host(const void* pointer);

/// Runs `work` in the order of `stream`: on the stream's thread, or at once if the stream is idle
/// and does not lag. If `work` throws, the device is lost, as after an assertion in a kernel: all
/// later calls return cudaErrorAssert.
/// @param blocks `work` waits for other streams or processes, so it never runs at once
/// @return cudaErrorInvalidResourceHandle if there is no such stream
cudaError_t enqueue(cudaStream_t stream, Work work, bool blocks = false);

/// Whether FAKE_CUDA_SEED is set: streams lag behind the host by random times.
bool lags();

/// Adds one to counts().
void count(Count which);

}  // namespace fake_cuda
