// Kernels and their launches.
#include <cstdio>
#include <mutex>
#include <ranges>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "operators_library.h"
#include "runtime.h"

namespace fake_cuda {
namespace {

class Kernels {
 public:
  /// @param function the address of the host stub, which identifies the kernel in launches
  void add(const void* function, const char* mangled_name) {
    const std::lock_guard lock(mutex_);
    names_.insert_or_assign(function, mangled_name);
  }

  struct Definition {
    std::string name;
    Launch launch;
  };

  void define(Definition definition) {
    const std::lock_guard lock(mutex_);
    definitions_.push_back(std::move(definition));
  }

  /// The result has no launch, and a line is on stderr, if there is no stand-in for the kernel.
  Definition find(const void* function) {
    const std::lock_guard lock(mutex_);
    const auto name = names_.find(function);
    if (name != names_.end()) {
      for (const Definition& definition : std::views::reverse(definitions_)) {
        if (name->second.find(definition.name) != std::string::npos) return definition;
      }
    }
    std::fprintf(stderr, "fake_cuda: no stand-in for the kernel %s\n",
                 name == names_.end() ? "at an unknown address" : name->second.c_str());
    return {};
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::string> names_;
  std::vector<Definition> definitions_;
};

Kernels& kernels() {
  static auto* const kernels = new Kernels;
  return *kernels;
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                   cudaStream_t stream) {
  if (const cudaError_t error = ready(); error != cudaSuccess) return error;
  constexpr uint64_t kMaxThreads = 1024;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || uint64_t{grid.x} * grid.y * grid.z == 0) {
    return cudaErrorInvalidConfiguration;
  }
  const Kernels::Definition found = kernels().find(function);
  if (!found.launch) return cudaErrorInvalidDeviceFunction;
  count(Count::kKernels);
  auto [work, blocks] = found.launch(grid, block, shared, arguments);
  return enqueue(stream, std::move(work), blocks);
}

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
};
// Launches with <<< >>> that this thread has started.
thread_local std::vector<Configuration> configurations;

}  // namespace

void define_launch(std::string name, Launch launch) {
  kernels().define({std::move(name), std::move(launch)});
}

}  // namespace fake_cuda

using fake_cuda::fail;

extern "C" {

void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle = nullptr;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void** /*handle*/) {
  fake_cuda::note_new_library();
}

void __cudaUnregisterFatBinary(void** /*handle*/) {}

char __cudaInitModule(void** /*handle*/) {
  return 0;
}

void __cudaRegisterVar(void** /*handle*/, char* /*variable*/, char* /*address*/,
                       const char* /*name*/, int /*ext*/, size_t /*size*/, int /*constant*/,
                       int /*global*/) {}

void __cudaRegisterFunction(void** /*handle*/, const char* stub, char* /*function*/,
                            const char* name, int /*thread_limit*/, uint3* /*thread_index*/,
                            uint3* /*block_index*/, dim3* /*block*/, dim3* /*grid*/,
                            int* /*warp_size*/) {
  fake_cuda::kernels().add(stub, name);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  fake_cuda::configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const fake_cuda::Configuration last = fake_cuda::configurations.back();
  fake_cuda::configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

// A kernel's handle is the address of its host stub.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::launch(function, grid, block, arguments, shared, stream));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared,
                          stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                        void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments,
                          config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  constexpr int kVersion = 90;
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = kVersion;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute /*attribute*/,
                                 int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* /*function*/,
                                                                   int /*block_size*/,
                                                                   size_t /*shared*/,
                                                                   unsigned /*flags*/) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int block_size, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size,
                                                                shared, 0);
}

}  // extern "C"
