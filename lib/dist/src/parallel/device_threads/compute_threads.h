#pragma once

#include <functional>
#include <vector>

#include <c10/core/Device.h>

#include "device_threads/device_threads.h"

namespace syncbn::dist::detail {

/// Validates a device and fills in its index.
/// @param wrapper named in errors
/// @throws base::UserError if this machine does not have the device
at::Device checked_device(const char* wrapper, at::Device device);

/// DeviceThreads for libtorch: each thread gets an equal share of ATen's threads.
class ComputeThreads {
 public:
  ComputeThreads(const char* owner, std::vector<at::Device> devices);

  [[nodiscard]] DeviceThreads::Claim claim() { return threads_.claim(); }

  /// DeviceThreads::run(), in the caller's modes (of gradients, autocast and others) and on its GPU
  /// streams.
  void run(int count, const std::function<void(int)>& work);

 private:
  const std::vector<at::Device> devices_;
  DeviceThreads threads_;
};

}  // namespace syncbn::dist::detail
