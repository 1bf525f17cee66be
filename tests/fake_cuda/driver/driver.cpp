// The stand-in for libcuda.so.1: the few functions of the driver that torch calls.
#include <cuda.h>
#include <dlfcn.h>

extern "C" {

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  using HasContext = bool (*)(int device);
  static const auto has_context =
      reinterpret_cast<HasContext>(::dlsym(RTLD_DEFAULT, "fake_cuda_has_context"));
  *flags = 0;
  *active = has_context(device) ? 1 : 0;
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

/// libtorch calls ncclMemAlloc() only for GPUs that support multicast, as those of an NVSwitch do.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice /*device*/) {
  *value = 1;
  return attribute == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED ? CUDA_SUCCESS
                                                              : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "no error" : "error of the fake driver";
  return CUDA_SUCCESS;
}

}  // extern "C"
