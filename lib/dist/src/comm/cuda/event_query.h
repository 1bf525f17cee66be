#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

namespace syncbn::dist::detail {

/// Whether the device has reached the event. May be called on any thread.
inline bool has_ended(at::cuda::CUDAEvent& event) {
  // Otherwise the monitor's thread would create a context on GPU 0, which may be another rank's.
  const c10::cuda::CUDAGuard device(event.device_index());
  // Otherwise the query would break the capture of a graph on another thread.
  const c10::cuda::CUDAStreamCaptureModeGuard allowed(cudaStreamCaptureModeThreadLocal);
  return cudaEventQuery(event) == cudaSuccess;
}

}  // namespace syncbn::dist::detail
