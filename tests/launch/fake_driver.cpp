// A stand-in for the part of NVIDIA's libcuda.so.1 that --preflight calls. FAKE_DRIVER has one word
// for each GPU: fine, slow, fails, hangs, dies. Or it describes the driver itself: none, broken, or
// "hangs at once".
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kNoDevice = 100;
constexpr int kEccError = 214;
constexpr int kUnknown = 999;

std::string wanted() {
  const char* gpus = std::getenv("FAKE_DRIVER");
  return gpus != nullptr ? gpus : "none";
}

const std::vector<std::string>& gpus() {
  static const auto all = [] {
    std::vector<std::string> words;
    std::istringstream text(wanted());
    for (std::string word; std::getline(text, word, ',');) words.push_back(word);
    return words;
  }();
  return all;
}

thread_local std::string current;
thread_local std::chrono::duration<double> pending{};  // work of the current GPU

}  // namespace

extern "C" {

int cuInit(unsigned /*flags*/) {
  if (wanted() == "hangs at once") ::pause();
  if (wanted() == "broken") return kUnknown;
  return wanted() == "none" ? kNoDevice : 0;
}

int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(gpus().size());
  return 0;
}

int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}

int cuDeviceGetName(char* name, int size, int /*device*/) {
  std::snprintf(name, static_cast<size_t>(size), "Fake CUDA GPU");
  return 0;
}

int cuDeviceGetPCIBusId(char* address, int size, int device) {
  std::snprintf(address, static_cast<size_t>(size), "0000:%02x:00.0", device);
  return 0;
}

int cuDeviceTotalMem_v2(size_t* bytes, int /*device*/) {
  *bytes = size_t{64} << 20;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::string& gpu = gpus().at(static_cast<size_t>(device));
  if (gpu == "hangs") ::pause();
  if (gpu == "dies") std::raise(SIGSEGV);
  *context = const_cast<std::string*>(&gpu);
  return 0;
}

int cuCtxSetCurrent(void* context) {
  current = *static_cast<std::string*>(context);
  return 0;
}

int cuMemAlloc_v2(unsigned long long* address, size_t /*size*/) {
  *address = 4096;
  return 0;
}

int cuMemcpyDtoD_v2(unsigned long long /*to*/, unsigned long long /*from*/, size_t size) {
  const double rate = current == "slow" ? 1e10 : 1e11;  // bytes per second
  pending += std::chrono::duration<double>(static_cast<double>(size) / rate);
  return 0;
}

int cuCtxSynchronize() {
  std::this_thread::sleep_for(std::exchange(pending, {}));  // the time that the copies take
  return current == "fails" ? kEccError : 0;
}

int cuGetErrorName(int error, const char** name) {
  thread_local std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "CUDA_ERROR_%d", error);
  *name = text.data();
  return 0;
}

}  // extern "C"
