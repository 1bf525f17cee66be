// Devices and errors.
#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "operators_library.h"
#include "runtime.h"

extern "C" {
fake_cuda::Counters fake_cuda_counters{};
}

namespace fake_cuda {
namespace {

std::atomic<uint64_t> contexts{0};  ///< one bit per device

constexpr int kMaxThreadsPerBlock = 1024;

struct Error {
  cudaError_t code;
  const char* name;
  const char* text;
};
#define FAKE_CUDA_ERROR(code, text) \
  Error {                           \
    code, #code, text               \
  }
constexpr std::array kErrors{
    FAKE_CUDA_ERROR(cudaSuccess, "no error"),
    FAKE_CUDA_ERROR(cudaErrorInvalidValue, "invalid argument"),
    FAKE_CUDA_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    FAKE_CUDA_ERROR(cudaErrorInitializationError, "initialization error"),
    FAKE_CUDA_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    FAKE_CUDA_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    FAKE_CUDA_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    FAKE_CUDA_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    FAKE_CUDA_ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    FAKE_CUDA_ERROR(cudaErrorNotReady, "device not ready"),
    FAKE_CUDA_ERROR(cudaErrorAssert, "device-side assert triggered"),
    FAKE_CUDA_ERROR(cudaErrorNotSupported, "operation not supported"),
    FAKE_CUDA_ERROR(cudaErrorHostMemoryAlreadyRegistered,
                    "part or all of the requested memory range is already mapped"),
    FAKE_CUDA_ERROR(cudaErrorHostMemoryNotRegistered,
                    "pointer does not correspond to a registered memory region"),
    FAKE_CUDA_ERROR(cudaErrorUnknown, "unknown error"),
};

const Error& describe(cudaError_t code) {
  for (const Error& error : kErrors) {
    if (error.code == code) return error;
  }
  return kErrors.back();
}

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<bool> was_used{false};
std::atomic<bool> forked_after_use{false};
std::atomic<bool> lost{false};

/// The visible devices' numbers among all. As in CUDA, an invalid entry ends the list.
const std::vector<int>& visible_devices() {
  static const auto* const visible = [] {
    const int machine = static_cast<int>(setting("FAKE_CUDA_DEVICES", 0));
    auto* const devices = new std::vector<int>;
    const char* const list = std::getenv("CUDA_VISIBLE_DEVICES");
    if (list == nullptr) {
      for (int i = 0; i < machine; ++i) devices->push_back(i);
      return devices;
    }
    std::istringstream entries(list);
    for (std::string entry; std::getline(entries, entry, ',');) {
      char* end = nullptr;
      const long device = std::strtol(entry.c_str(), &end, 10);
      if (entry.empty() || *end != '\0' || device < 0 || device >= machine) break;
      devices->push_back(static_cast<int>(device));
    }
    return devices;
  }();
  return *visible;
}

}  // namespace

long setting(const char* name, long otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atol(text);
}

bool lags() {
  static const bool is_set = std::getenv("FAKE_CUDA_SEED") != nullptr;
  return is_set;
}

void count(Count which) {
  ++fake_cuda_counters.at(static_cast<size_t>(which));
}

int driver_version() {
  return static_cast<int>(setting("FAKE_CUDA_DRIVER", CUDART_VERSION));
}

int device_count() {
  return static_cast<int>(visible_devices().size());
}

bool is_device(int device) {
  return device >= 0 && device < device_count();
}

int current_device() {
  return device_of_thread;
}

void set_current_device(int device) {
  device_of_thread = device;
}

cudaError_t fail(cudaError_t error) {
  return last_error = error;
}

cudaError_t ready() {
  contexts |= uint64_t{1} << device_of_thread;
  return ready_without_context();
}

cudaError_t ready_without_context() {
  static const int watches_forks = ::pthread_atfork(nullptr, nullptr, [] {
    if (was_used) forked_after_use = true;
  });
  static_cast<void>(watches_forks);
  was_used = true;
  if (forked_after_use) return cudaErrorInitializationError;
  load_operators_of_new_libraries();
  return lost ? cudaErrorAssert : cudaSuccess;
}

void lose_devices(const std::string& reason) {
  const std::string first_line = reason.substr(0, reason.find('\n'));
  std::fprintf(stderr, "fake_cuda: a kernel failed: %s\n", first_line.c_str());
  lost = true;
}

bool devices_are_lost() {
  return lost;
}

}  // namespace fake_cuda

using fake_cuda::fail;

extern "C" {

/// The stand-in for libcuda.so.1 calls this.
bool fake_cuda_has_context(int device) {
  return (fake_cuda::contexts >> device & 1U) != 0;
}

cudaError_t cudaGetDeviceCount(int* count) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready_without_context());
  if (fake_cuda::driver_version() / 1000 < CUDART_VERSION / 1000) {
    return fail(cudaErrorInsufficientDriver);
  }
  *count = fake_cuda::device_count();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = fake_cuda::current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready_without_context());
  if (!fake_cuda::is_device(device)) return fail(cudaErrorInvalidDevice);
  fake_cuda::set_current_device(device);
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());  // creates the context, as CUDA does since version 12
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!fake_cuda::is_device(device)) return fail(cudaErrorInvalidDevice);
  const int number = fake_cuda::visible_devices()[static_cast<size_t>(device)];
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Fake CUDA GPU %d", number);
  properties->uuid.bytes[15] = static_cast<char>(number + 1);
  size_t free = 0;
  cudaMemGetInfo(&free, &properties->totalGlobalMem);
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->maxThreadsPerBlock = fake_cuda::kMaxThreadsPerBlock;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = fake_cuda::kMaxThreadsPerBlock;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->l2CacheSize = 50 << 20;
  properties->textureAlignment = 512;
  properties->memPitch = 2147483647;
  properties->pciDomainID = number;
  properties->pciBusID = 0xC0 + number;
  properties->unifiedAddressing = properties->concurrentKernels = properties->asyncEngineCount = 1;
  return cudaSuccess;
}

// The same address as from NVML's stand-in (tests/support/fake_nvml.cpp).
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (!fake_cuda::is_device(device)) return fail(cudaErrorInvalidDevice);
  const auto number =
      static_cast<unsigned>(fake_cuda::visible_devices()[static_cast<size_t>(device)]);
  std::snprintf(text, static_cast<size_t>(length), "%04X:C%X:00.0", number, number);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = fake_cuda::driver_version();
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = static_cast<int>(fake_cuda::setting("FAKE_CUDA_VERSION", CUDART_VERSION));
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!fake_cuda::is_device(device) || !fake_cuda::is_device(peer))
    return fail(cudaErrorInvalidDevice);
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned /*flags*/) {
  return fake_cuda::is_device(peer) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  constexpr int kGreatest = -5;
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = kGreatest;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  fake_cuda::count(fake_cuda::Count::kDeviceWaits);
  fake_cuda::drain_device(fake_cuda::current_device());
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  return cudaSuccess;
}

/// Looks up functions of the stand-in for libcuda.so.1.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                             unsigned /*cudaVersion*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* status) {
  *function = ::dlsym(RTLD_DEFAULT, symbol);
  const bool found = *function != nullptr;
  if (status != nullptr) {
    *status = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return found ? cudaSuccess : fail(cudaErrorSymbolNotFound);
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = std::exchange(fake_cuda::last_error, cudaSuccess);
  return fake_cuda::devices_are_lost() ? cudaErrorAssert : error;
}

cudaError_t cudaPeekAtLastError() {
  return fake_cuda::devices_are_lost() ? cudaErrorAssert : fake_cuda::last_error;
}

const char* cudaGetErrorName(cudaError_t error) {
  return fake_cuda::describe(error).name;
}

const char* cudaGetErrorString(cudaError_t error) {
  return fake_cuda::describe(error).text;
}

}  // extern "C"
