#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail {

/// The seam to NCCL and CUDA: a shared library beside this one, libsyncbn_dist_cuda.so, fills it in
/// when it is there and loads. Nothing on this side links CUDA.
struct CudaSupport {
  int (*device_count)();
  /// Makes `device` the calling thread's current one.
  void (*set_device)(int device);
  c10::intrusive_ptr<c10d::Backend> (*make_nccl)(const c10::intrusive_ptr<c10d::Store>& store,
                                                 int rank, int world_size, int device,
                                                 std::chrono::milliseconds timeout);
  BatchNormKernels batch_norm;
};

/// Loads the library once; null when it is not installed or does not load here.
const CudaSupport* cuda_support();

/// Why cuda_support() is null, for messages.
std::string cuda_support_error();

/// The library's only entry point.
inline constexpr char kCudaSupportSymbol[] = "syncbn_cuda_support";
using CudaSupportFunction = const CudaSupport* (*)();

}  // namespace syncbn::dist::detail
