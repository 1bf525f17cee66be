// Devices and NCCL, for libsyncbn_dist_cuda.so.

#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "groups/cuda_support.h"

namespace syncbn::dist::detail {
namespace {

class Nccl : public Transport {
 public:
  explicit Nccl(c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl) : nccl_(std::move(nccl)) {}

  c10d::Backend& prepare(const Call& /*call*/) override { return *nccl_; }
  void set_timeout(std::chrono::milliseconds timeout) override { nccl_->setTimeout(timeout); }
  void abort() override { nccl_->abort(); }
  void shutdown() override { nccl_->shutdown(); }
  bool runs_on_streams() const override { return true; }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl_;
};

std::shared_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                     int world_size, int device,
                                     std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  // Small exchanges inside forward and backward must not queue behind the kernels of other streams.
  options->is_high_priority_stream = true;
  auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size, options);
  nccl->setBoundDeviceId(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)));
  return std::make_shared<Nccl>(std::move(nccl));
}

int device_count() {
  return c10::cuda::device_count();
}

void set_device(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

constexpr CudaSupport kCudaSupport{device_count, set_device, make_nccl};

}  // namespace
}  // namespace syncbn::dist::detail

extern "C" __attribute__((visibility("default"))) const void* syncbn_cuda_support() {
  return &syncbn::dist::detail::kCudaSupport;
}
