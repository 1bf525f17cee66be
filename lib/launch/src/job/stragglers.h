#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "job/worker_state.h"

namespace syncbn::launch {

/// Finds ranks that keep the others waiting in every step: they spend more time outside of the
/// calls of lib/dist than the others, which wait for them there. Not thread-safe.
class StragglerWatch {
 public:
  /// @param interval between two calls of add().
  explicit StragglerWatch(std::chrono::duration<double> interval) : interval_(interval) {}

  /// Takes the state of all workers at the end of an interval. Returns a line about each rank whose
  /// own time was above kStragglerFactor times the median's for kIntervals in a row; each rank is
  /// named once.
  std::vector<std::string> add(const std::vector<WorkerState>& workers);

  static constexpr int kIntervals = 3;

 private:
  struct Past {
    double own_seconds = 0;
    uint64_t calls = 0;
    int slow_intervals = 0;
  };
  std::chrono::duration<double> interval_;
  std::map<int, Past> past_;  ///< by rank
  std::set<int> named_;
};

}  // namespace syncbn::launch
