#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <memory>
#include <string>
#include <vector>

#include "machine/devices.h"

namespace syncbn::launch {
namespace {

// The declarations of nvml.h (CUDA toolkit) that are needed here.
using Device = void*;
struct PciInfo {
  std::array<char, 16> legacy_address;
  std::array<unsigned, 5> numbers;
  std::array<char, 32> address;  ///< "00000000:DC:00.0"
};
constexpr int kSuccess = 0;

/// As /sys writes it: four digits for the domain, lower case.
std::string sys_address(std::string address) {
  constexpr size_t kDomainDigits = 4;
  const size_t colon = address.find(':');
  if (colon != std::string::npos && colon > kDomainDigits) address.erase(0, colon - kDomainDigits);
  std::transform(address.begin(), address.end(), address.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return address;
}

}  // namespace

std::vector<Gpu> gpus_of_nvml() {
  const std::unique_ptr<void, int (*)(void*)> library(
      ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), ::dlclose);
  if (!library) return {};
  const auto call = [&]<class... Args>(const char* name, Args... args) {
    auto* const function = reinterpret_cast<int (*)(Args...)>(::dlsym(library.get(), name));
    return function != nullptr && function(args...) == kSuccess;
  };
  if (!call("nvmlInit_v2")) return {};
  unsigned count = 0;
  call("nvmlDeviceGetCount_v2", &count);
  std::vector<Gpu> gpus(count);
  for (unsigned i = 0; i < count; ++i) {
    Device device = nullptr;
    std::array<char, 96> uuid{};
    PciInfo info{};
    if (!call("nvmlDeviceGetHandleByIndex_v2", i, &device)) continue;
    const auto size = static_cast<unsigned>(uuid.size());
    if (call("nvmlDeviceGetUUID", device, uuid.data(), size)) gpus[i].uuid = uuid.data();
    if (call("nvmlDeviceGetPciInfo_v3", device, &info)) {
      gpus[i].address = sys_address(info.address.data());
    }
  }
  call("nvmlShutdown");
  return gpus;
}

}  // namespace syncbn::launch
