#pragma once

#include <cstdint>

#include <c10/core/Device.h>

namespace syncbn::train {

/// How long this rank's steps waited for their batches. Not thread-safe.
class DataWait {
 public:
  /// Seconds of a step on average, and what share of the time that is, in [0, 1].
  struct Means {
    double seconds = 0;
    double share = 0;
  };

  void start_epoch();
  /// One step's wait, in seconds.
  void add(double seconds);

  /// Of the epoch so far, which took `elapsed` seconds.
  Means of_epoch(double elapsed) const;

  /// Seconds of a step on average since the last call or the beginning of the epoch.
  double mean_since_last();

 private:
  struct Sum {
    double seconds = 0;
    int64_t steps = 0;
    double mean() const { return steps > 0 ? seconds / static_cast<double>(steps) : 0; }
  };

  Sum epoch_;
  Sum since_last_;
};

/// The largest of all ranks': in each step all wait for the one whose batch comes last. Every rank
/// calls it; `device` is where the default group exchanges tensors.
DataWait::Means longest(const DataWait::Means& own, at::Device device);

}  // namespace syncbn::train
