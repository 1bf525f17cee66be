// Kernels. No kernel runs: the operators' stand-ins replace ATen's.
#include <cstdio>

#include "operators_library.h"
#include "runtime.h"

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

/// Comes before each launch, which does not happen if this fails.
unsigned __cudaPushCallConfiguration(dim3 /*grid*/, dim3 /*block*/, size_t /*shared*/,
                                     CUstream_st* /*stream*/) {
  std::fprintf(stderr, "fake_cuda: a kernel was launched, and no stand-in replaces its operator\n");
  fake_cuda::fail(cudaErrorInvalidDeviceFunction);
  return 1;
}

}  // extern "C"
