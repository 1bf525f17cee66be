#include "batch_norm/batch_norm_kernels.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include "batch_norm/batch_norm_cpu_kernels.h"
#include "groups/cuda_support.h"

namespace syncbn::dist::detail {
namespace {

constexpr BatchNormKernels kCpuKernels{cpu::moments,
                                       cpu::merge,
                                       cpu::inverse_deviation,
                                       cpu::update_running,
                                       cpu::transform,
                                       cpu::pass_gate,
                                       cpu::backward_reduce,
                                       cpu::backward_elementwise,
                                       cpu::parameter_gradients,
                                       cpu::normalize_alone,
                                       cpu::backward_alone};

}  // namespace

const BatchNormKernels& batch_norm_kernels(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return kCpuKernels;
  if (device == c10::DeviceType::CUDA) {
    static const void* const cuda = cuda_table("syncbn_cuda_batch_norm");
    if (cuda != nullptr) return *static_cast<const BatchNormKernels*>(cuda);
    throw base::UserError("SyncBatchNorm on a CUDA device needs the CUDA part of this library: " +
                          cuda_support_error());
  }
  throw base::UserError(fmt::format("SyncBatchNorm has no kernels for device type {}",
                                    c10::DeviceTypeName(device, /*lower_case=*/true)));
}

}  // namespace syncbn::dist::detail
