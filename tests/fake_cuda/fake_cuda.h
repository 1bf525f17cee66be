// What the fake CUDA devices offer beyond CUDA's interface, to the stand-ins for NCCL, ATen's
// operators and kernels, and to tests. All functions are thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "counts.h"

namespace fake_cuda {

using Work = std::function<void()>;

/// Where the bytes of device memory really are; returns a host pointer unchanged. Device pointers
/// are in pages without access, so host code that dereferences one crashes, as with a real GPU.
void* host(const void* pointer);

/// Runs `work` in the order of `stream`: on the stream's thread, or at once if the stream is idle
/// and does not lag. While the stream is capturing, `work` becomes a node of the graph instead and
/// runs at each replay. If `work` throws, the device is lost, as after an assertion in a kernel:
/// all later calls return cudaErrorAssert.
/// @param blocks `work` waits for other streams or processes, so it never runs at once
/// @return cudaErrorInvalidResourceHandle if there is no such stream, or an error of the capture
cudaError_t enqueue(cudaStream_t stream, Work work, bool blocks = false);

/// Whether FAKE_CUDA_SEED is set: streams lag behind the host by random times.
bool lags();

/// Adds one to counts().
void count(Count which);

/// The arguments of enqueue().
struct Launched {
  Work work;
  bool blocks = false;
};

/// The second half of a kernel's launch: copies the arguments, which live until cudaLaunchKernel
/// returns, and returns the work for the stream.
using Launch =
    std::function<Launched(dim3 grid, dim3 block, size_t shared_bytes, void** arguments)>;

/// Defines the stand-in for the __global__ functions whose mangled name contains `name`; the latest
/// definition wins. Without one, a launch fails with cudaErrorInvalidDeviceFunction.
void define_launch(std::string name, Launch launch);

/// Applies host() to the device pointers among `size` bytes at `bytes`. No other value lies in the
/// address range that is reserved for devices.
void translate_pointers(void* bytes, size_t size);

/// Defines a stand-in as a function with the kernel's parameters. It runs on the stream; pointers
/// among its arguments, also inside structs, are host pointers.
/// @param blocks whether the stand-in waits for other streams or processes; null: it does not
template <class... Parameters>
void define_kernel(std::string name,
                   void (*body)(dim3 grid, dim3 block, size_t shared_bytes,
                                Parameters... parameters),
                   bool (*blocks)(const Parameters&... parameters) = nullptr) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...));
  Launch launch = [body, blocks](dim3 grid, dim3 block, size_t shared_bytes, void** given) {
    std::tuple<Parameters...> copies;
    std::apply(
        [given](auto&... copy) {
          size_t i = 0;
          ((std::memcpy(&copy, given[i++], sizeof copy), translate_pointers(&copy, sizeof copy)),
           ...);
        },
        copies);
    const bool waits = blocks != nullptr && std::apply(blocks, copies);
    return Launched{[=] {
                      std::apply([&](auto... copy) { body(grid, block, shared_bytes, copy...); },
                                 copies);
                    },
                    waits};
  };
  define_launch(std::move(name), std::move(launch));
}

}  // namespace fake_cuda
