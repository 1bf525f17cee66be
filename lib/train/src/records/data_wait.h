#pragma once

#include <cstdint>

namespace syncbn::train {

/// How long this rank's steps waited for their batches. Not thread-safe.
class DataWait {
 public:
  struct Means {
    double seconds = 0;  ///< mean per step
    double share = 0;    ///< of the elapsed time, in [0, 1]
  };

  void start_epoch() { epoch_ = since_last_ = {}; }
  /// Adds the wait of one step, in seconds.
  void add(double seconds);

  /// The epoch so far, which took `elapsed` seconds.
  Means of_epoch(double elapsed) const;

  /// Seconds per step since the last call or the start of the epoch.
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

/// The largest means of all ranks: a step takes as long as the slowest rank's. Every rank calls it.
DataWait::Means longest(const DataWait::Means& own);

}  // namespace syncbn::train
