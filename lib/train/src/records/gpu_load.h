#pragma once

#include <optional>
#include <string>

#include <c10/core/Device.h>

namespace syncbn::train {

/// How an epoch used the GPUs.
struct GpuLoad {
  double memory_bytes = 0;  ///< peak memory of tensors, on the rank with the most
  /// Of the least busy GPU, in the last second of training: [0, 1]. Empty if the driver of any rank
  /// does not report it, as for a part of a GPU (MIG).
  std::optional<double> utilization = {};
};

/// Measures the load of this rank's GPU. Not thread-safe.
class GpuMeter {
 public:
  /// @param device if it is a CPU, there is nothing to measure
  explicit GpuMeter(at::Device device);

  void start_epoch() const;
  /// Every rank calls it.
  /// @return empty on CPUs
  std::optional<GpuLoad> of_all_ranks() const;

 private:
  const at::Device device_;
  std::string uuid_;
};

}  // namespace syncbn::train
