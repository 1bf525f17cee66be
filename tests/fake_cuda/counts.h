// What a process has asked of the fake CUDA devices so far. Needs no CUDA header, and a test that
// includes this links nothing.
#pragma once

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace fake_cuda {

enum class Count : uint8_t {
  kOperators,      ///< of ATen; a real GPU launches one or more kernels for each
  kCollectives,    ///< of NCCL; a group's calls on one communicator and stream count once
  kSplits,         ///< communicators that ncclCommSplit has made
  kRegistrations,  ///< of buffers with a communicator
  kMemsets,
  kHostToDevice,  ///< copies, by source and destination
  kDeviceToHost,
  kDeviceToDevice,
  kHostToHost,
  kStreamWaits,    ///< cudaStreamSynchronize
  kEventWaits,     ///< cudaEventSynchronize
  kDeviceWaits,    ///< cudaDeviceSynchronize and cudaFree
  kPageableWaits,  ///< copies from a device to memory that is not pinned, and cudaMemcpy
  kEnd
};

/// One number for each Count.
class Counts {
 public:
  uint64_t& operator[](Count which) { return values_[static_cast<size_t>(which)]; }
  uint64_t operator[](Count which) const { return values_[static_cast<size_t>(which)]; }
  /// How often the host waited for a GPU.
  uint64_t host_waits() const {
    return (*this)[Count::kStreamWaits] + (*this)[Count::kEventWaits] +
           (*this)[Count::kDeviceWaits] + (*this)[Count::kPageableWaits];
  }
  friend Counts operator-(Counts after, const Counts& before) {
    for (size_t i = 0; i < after.values_.size(); ++i) after.values_[i] -= before.values_[i];
    return after;
  }

 private:
  std::array<uint64_t, static_cast<size_t>(Count::kEnd)> values_{};
};

using Counters = std::array<std::atomic<uint64_t>, static_cast<size_t>(Count::kEnd)>;

/// The process's counters; null without fake CUDA devices.
inline Counters* counters() {
  static auto* const found = static_cast<Counters*>(::dlsym(RTLD_DEFAULT, "fake_cuda_counters"));
  return found;
}

/// What this process has done since its start. Aborts without fake CUDA devices.
inline Counts counts() {
  if (counters() == nullptr) std::abort();
  Counts now;
  for (size_t i = 0; i < counters()->size(); ++i) now[static_cast<Count>(i)] = (*counters())[i];
  return now;
}

}  // namespace fake_cuda
