// Devices and NCCL, for libsyncbn_dist_cuda.so.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <array>
#include <cstdint>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/cuda/nccl.h>
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

std::string why_unusable() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess && error != cudaErrorNoDevice) {
    static_cast<void>(cudaGetLastError());  // or the next call would report it
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return fmt::format(
        "CUDA does not start: {} (the driver knows CUDA {}.{}, this program uses {}.{})",
        cudaGetErrorString(error), driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
        CUDART_VERSION % 1000 / 10);
  }
  // ProcessGroupNCCL's options hold structures of NCCL by value, so the headers of libtorch and of
  // this library must agree; the library may be newer.
  int library = 0;
  ncclGetVersion(&library);
  const uint64_t of_torch = torch::cuda::nccl::version();
  const uint64_t ours = uint64_t{NCCL_MAJOR} << 32 | uint64_t{NCCL_MINOR} << 16 | NCCL_PATCH;
  if (of_torch >> 16 != ours >> 16 || library < NCCL_VERSION_CODE) {
    return fmt::format(
        "versions of NCCL do not fit: this program was built with {}.{}.{}, libtorch with "
        "{}.{}.{}, "
        "and the library that was loaded is {}.{}.{}; build with the nccl.h of libtorch's version, "
        "and see LD_LIBRARY_PATH",
        NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH, of_torch >> 32, of_torch >> 16 & 0xFFFF,
        of_torch & 0xFFFF, library / 10000, library % 10000 / 100, library % 100);
  }
  return "";
}

std::string pci_address(int device) {
  std::array<char, 16> address{};
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(address.data(), static_cast<int>(address.size()), device));
  return address.data();
}

int device_count() {
  return c10::cuda::device_count();
}

void set_device(int device) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

constexpr CudaSupport kCudaSupport{why_unusable, device_count, pci_address, set_device, make_nccl};

}  // namespace
}  // namespace syncbn::dist::detail

extern "C" __attribute__((visibility("default"))) const void* syncbn_cuda_support() {
  return &syncbn::dist::detail::kCudaSupport;
}
