#pragma once

#include <functional>
#include <vector>

#include <c10/core/Device.h>

#include "device_threads/device_threads.h"

namespace syncbn::dist::detail {

/// The device that a wrapper named `wrapper` was given, with its number.
/// @throws base::UserError if it is not there
at::Device checked_device(const char* wrapper, at::Device device);

/// A thread for each device that computes with libtorch, with a share of ATen's threads.
class ComputeThreads {
 public:
  explicit ComputeThreads(std::vector<at::Device> devices);

  /// DeviceThreads::run(), in the caller's modes (of gradients, autocast and others) and on its GPU
  /// streams.
  void run(int count, const std::function<void(int)>& work);

 private:
  const std::vector<at::Device> devices_;
  DeviceThreads threads_;
};

}  // namespace syncbn::dist::detail
