#pragma once

#include <chrono>
#include <string>

#include <c10/core/Device.h>

namespace syncbn::train {

/// The most that this process has had in RAM so far.
double peak_resident_bytes();

/// The memory that this rank uses, for people. Not thread-safe.
class MemoryGauge {
 public:
  explicit MemoryGauge(at::Device device) : device_(device) {}

  /// "1.2 GB": on a GPU that tensors have there, otherwise that the process has in RAM. At most one
  /// second old.
  const std::string& text();

 private:
  const at::Device device_;
  std::chrono::steady_clock::time_point read_;
  std::string text_;
};

}  // namespace syncbn::train
