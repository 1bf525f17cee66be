#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

namespace syncbn::dist::detail {

/// Whether the device has reached the event. For any thread.
inline bool has_ended(at::cuda::CUDAEvent& event) {
  // The monitor's thread would create a context on the first GPU, which is another rank's.
  const c10::cuda::CUDAGuard device(event.device_index());
  // Otherwise a query would break the capture of a graph by another thread.
  const c10::cuda::CUDAStreamCaptureModeGuard allowed(cudaStreamCaptureModeThreadLocal);
  return cudaEventQuery(event) == cudaSuccess;
}

}  // namespace syncbn::dist::detail
