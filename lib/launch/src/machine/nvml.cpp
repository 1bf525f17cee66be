#include "machine/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

namespace syncbn::launch {
namespace {

// The few of NVML's declarations that are needed (nvml.h of the CUDA toolkit).
using Device = void*;
struct PciInfo {
  std::array<char, 16> legacy_address;
  std::array<unsigned, 5> numbers;
  std::array<char, 32> address;  ///< "00000000:DC:00.0"
};
using Plain = int();
using DeviceCount = int(unsigned*);
using DeviceByIndex = int(unsigned, Device*);
using DeviceUuid = int(Device, char*, unsigned);
using DevicePciInfo = int(Device, PciInfo*);
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

template <class Function>
Function* Nvml::find(const char* name) const {
  return library_ == nullptr ? nullptr : reinterpret_cast<Function*>(::dlsym(library_, name));
}

Nvml::Nvml() : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
  const auto init = find<Plain>("nvmlInit_v2");
  if (library_ == nullptr || (init != nullptr && init() == kSuccess)) return;
  ::dlclose(library_);
  library_ = nullptr;
}

Nvml::~Nvml() {
  if (library_ == nullptr) return;
  if (const auto shutdown = find<Plain>("nvmlShutdown")) shutdown();
  ::dlclose(library_);
}

int Nvml::count() const {
  const auto get_count = find<DeviceCount>("nvmlDeviceGetCount_v2");
  unsigned count = 0;
  if (get_count == nullptr || get_count(&count) != kSuccess) return 0;
  return static_cast<int>(count);
}

std::vector<Gpu> Nvml::gpus() const {
  std::vector<Gpu> gpus(static_cast<size_t>(count()));
  const auto by_index = find<DeviceByIndex>("nvmlDeviceGetHandleByIndex_v2");
  const auto get_uuid = find<DeviceUuid>("nvmlDeviceGetUUID");
  const auto get_pci_info = find<DevicePciInfo>("nvmlDeviceGetPciInfo_v3");
  if (by_index == nullptr || get_uuid == nullptr || get_pci_info == nullptr) return gpus;
  for (unsigned i = 0; i < gpus.size(); ++i) {
    Device device = nullptr;
    std::array<char, 96> uuid{};
    PciInfo info{};
    if (by_index(i, &device) != kSuccess) continue;
    if (get_uuid(device, uuid.data(), uuid.size()) == kSuccess) gpus[i].uuid = uuid.data();
    if (get_pci_info(device, &info) == kSuccess) {
      gpus[i].address = sys_address(info.address.data());
    }
  }
  return gpus;
}

}  // namespace syncbn::launch
