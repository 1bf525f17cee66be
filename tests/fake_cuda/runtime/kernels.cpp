// Kernels. No kernel runs: the operators' stand-ins replace ATen's.
#include <cstdio>

#include "operators_library.h"
#include "runtime.h"

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

void __cudaRegisterFunction(void** /*handle*/, const char* /*stub*/, char* /*function*/,
                            const char* /*name*/, int /*thread_limit*/, uint3* /*thread_index*/,
                            uint3* /*block_index*/, dim3* /*block*/, dim3* /*grid*/,
                            int* /*warp_size*/) {}

unsigned __cudaPushCallConfiguration(dim3 /*grid*/, dim3 /*block*/, size_t /*shared*/,
                                     CUstream_st* /*stream*/) {
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3();
  *shared = 0;
  *static_cast<cudaStream_t*>(stream) = nullptr;
  return cudaSuccess;
}

// A kernel's handle is the address of its host stub.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* /*function*/, dim3 /*grid*/, dim3 /*block*/,
                             void** /*arguments*/, size_t /*shared*/, cudaStream_t /*stream*/) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  std::fprintf(stderr, "fake_cuda: a kernel was launched, and no stand-in replaces its operator\n");
  return fail(cudaErrorInvalidDeviceFunction);
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
