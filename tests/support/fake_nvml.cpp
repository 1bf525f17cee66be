// A stand-in for NVIDIA's libnvidia-ml.so.1 with FAKE_NVML_GPUS GPUs, or FAKE_CUDA_DEVICES beside
// the fake CUDA devices (tests/fake_cuda). FAKE_NVML_GPUS=none is a driver that does not start.
// With FAKE_NVML_NO_UTILIZATION set, it does not report the GPUs' utilization. Creates the file
// FAKE_NVML_TRACE when it is loaded.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kDriverNotLoaded = 9;
bool running = false;
// A device's handle is the address of its number in this array.
std::array<unsigned, 64> numbers{};

std::string wanted() {
  for (const char* name : {"FAKE_NVML_GPUS", "FAKE_CUDA_DEVICES"}) {
    if (const char* gpus = std::getenv(name)) return gpus;
  }
  return "none";
}

__attribute__((constructor)) void leave_trace() {
  const char* trace = std::getenv("FAKE_NVML_TRACE");
  if (trace == nullptr) return;
  if (std::FILE* file = std::fopen(trace, "w")) std::fclose(file);
}

struct PciInfo {
  std::array<char, 16> busIdLegacy;
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  std::array<char, 32> busId;
};

}  // namespace

extern "C" {

int nvmlInit_v2() {
  running = wanted() != "none";
  return running ? kSuccess : kDriverNotLoaded;
}

int nvmlInit() {  // torch in Python calls this
  return nvmlInit_v2();
}

int nvmlShutdown() {
  running = false;
  return kSuccess;
}

int nvmlSystemGetDriverVersion(char* version, unsigned length) {
  std::snprintf(version, length, "535.0.fake");
  return kSuccess;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  if (!running) return kDriverNotLoaded;
  *count = static_cast<unsigned>(std::stoi(wanted()));
  return kSuccess;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  numbers.at(index) = index;
  *device = &numbers.at(index);
  return kSuccess;
}

int nvmlDeviceGetUUID(void* device, char* uuid, unsigned length) {
  std::snprintf(uuid, length, "GPU-fake-%u", *static_cast<unsigned*>(device));
  return kSuccess;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  unsigned index = 0;
  if (std::sscanf(uuid, "GPU-fake-%u", &index) != 1) return kNotSupported;
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlDeviceGetUtilizationRates(void* device, unsigned* percents) {
  if (std::getenv("FAKE_NVML_NO_UTILIZATION") != nullptr) return kNotSupported;
  percents[0] = 50 + *static_cast<unsigned*>(device);
  percents[1] = 10;
  return kSuccess;
}

int nvmlDeviceGetPciInfo_v3(void* device, PciInfo* info) {
  const unsigned index = *static_cast<unsigned*>(device);
  std::memset(info, 0xff, sizeof(*info));
  std::snprintf(info->busId.data(), info->busId.size(), "%08X:C%X:00.0", index, index);
  return kSuccess;
}

// libtorch calls these when a GPU is out of memory.
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** device) {
  return nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(std::stoul(address, nullptr, 16)),
                                       device);
}

int nvmlDeviceGetComputeRunningProcesses(void* /*device*/, unsigned* count, void* /*processes*/) {
  *count = 0;
  return kSuccess;
}

// libtorch also looks these up.
int nvmlDeviceGetNvLinkRemoteDeviceType() {
  return kNotSupported;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2() {
  return kNotSupported;
}
int nvmlSystemGetCudaDriverVersion_v2() {
  return kNotSupported;
}

}  // extern "C"
