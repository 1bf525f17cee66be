#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace syncbn::dist::detail {
namespace {

__global__ void convert(const double* count, int* result) {
  constexpr double kMax = 2147483647.0;
  *result = static_cast<int>(min(*count, kMax));
}

}  // namespace

/// Declared in batch_norm_cuda.cpp.
at::Tensor count_to_int(const at::Tensor& count) {
  const c10::cuda::CUDAGuard guard(count.device());
  at::Tensor result = at::empty({1}, count.options().dtype(at::kInt));
  convert<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>(count.const_data_ptr<double>(),
                                                          result.mutable_data_ptr<int>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

}  // namespace syncbn::dist::detail
