// What the pretended machine offers beyond CUDA's own interface: to the stand-ins for NCCL and
// ATen's operators, to stand-ins for kernels, and to tests. All functions are thread-safe.
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

/// Where the bytes of device memory really are; a host pointer stays as it is. A device pointer is
/// in pages without access, so that host code that follows it crashes, as it does beside a GPU.
void* host(const void* pointer);

/// Runs `work` in the order of `stream`, on its thread, or at once if the stream is idle and does
/// not lag. While the stream is capturing, `work` becomes a node of the graph instead and runs at
/// each replay. If `work` throws, the device is lost, as after an assertion in a kernel: all later
/// calls return cudaErrorAssert.
/// @param blocks `work` waits for other streams or processes, so it never runs at once
/// @return cudaErrorInvalidResourceHandle without such a stream, or an error of the capture
cudaError_t enqueue(cudaStream_t stream, Work work, bool blocks = false);

/// Whether FAKE_CUDA_SEED is set: streams lag behind the host by random times.
bool lags();

/// Adds one to counts().
void count(Count which);

/// What enqueue() takes.
struct Launched {
  Work work;
  bool blocks = false;
};

/// The second half of a kernel's launch: copies the arguments, which live until cudaLaunchKernel
/// returns, and gives back what runs on the stream.
using Launch =
    std::function<Launched(dim3 grid, dim3 block, size_t shared_bytes, void** arguments)>;

/// Defines what stands in for the __global__ functions whose mangled name contains `name`. Without
/// one, a launch fails with cudaErrorInvalidDeviceFunction. The latest definition holds.
void define_launch(std::string name, Launch launch);

/// Replaces the device pointers among `size` bytes at `bytes` by host(). No other value lies in
/// the address range that is reserved for devices.
void translate_pointers(void* bytes, size_t size);

/// Defines a stand-in by a function with the parameters of the kernel. It runs on the stream, and
/// gets pointers (also those inside structs) that the host can follow.
/// @param blocks whether it waits for other streams or processes; null: it does not
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
