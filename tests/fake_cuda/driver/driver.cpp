// The stand-in for libcuda.so.1: the few functions of the driver that torch calls.
#include <cuda.h>

extern "C" {

CUresult cuDevicePrimaryCtxGetState(CUdevice /*device*/, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  static int only_context = 0;
  *context = reinterpret_cast<CUcontext>(&only_context);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext /*context*/) {
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "no error" : "error of the pretended driver";
  return CUDA_SUCCESS;
}

}  // extern "C"
