#pragma once

#include <chrono>
#include <string>

#include <c10/core/Device.h>

namespace syncbn::train {

/// Peak resident memory of this process, in bytes.
double peak_resident_bytes();

/// Shows how much memory this rank uses. Not thread-safe.
class MemoryGauge {
 public:
  explicit MemoryGauge(at::Device device) : device_(device) {}

  /// "1.2 GB": on a GPU the memory of tensors there, otherwise the process's resident memory. At
  /// most one second old.
  const std::string& text();

 private:
  const at::Device device_;
  std::chrono::steady_clock::time_point read_;
  std::string text_;
};

}  // namespace syncbn::train
