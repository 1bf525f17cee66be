#pragma once

#include <vector>

#include "machine/devices.h"

namespace syncbn::launch {

/// NVIDIA's management library, which comes with the driver, for as long as this object lives.
/// Where it is missing or does not start there are no GPUs.
class Nvml {
 public:
  Nvml();
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  int count() const;
  /// In the order of their addresses.
  std::vector<Gpu> gpus() const;

 private:
  template <class Function>
  Function* find(const char* name) const;

  void* library_ = nullptr;
};

}  // namespace syncbn::launch
