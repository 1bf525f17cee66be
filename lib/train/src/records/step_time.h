#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include <syncbn/dist/call_trace.h>

namespace syncbn::train {

/// What a rank's steps cost, and where the time goes: means in seconds. The rest of `whole` is the
/// copy to the device, clipping and the vote.
struct StepTime {
  double whole = 0;
  double data = 0;       ///< waiting for the batch
  double forward = 0;    ///< including the exchange of batch norm's statistics
  double backward = 0;   ///< likewise
  double exchange = 0;   ///< of gradients, the part that backward does not hide
  double optimizer = 0;  ///< 0 on GPUs, where it is part of the rest
  /// Time in which no thread waited for other ranks: the rank with the most holds up the others. 0
  /// on GPUs, and without a launcher.
  double own = 0;
  double memory_bytes = 0;  ///< peak resident memory of the process
};

/// Adds up times between two calls. Not thread-safe.
class LapTimer {
 public:
  void start() { begin_ = Clock::now(); }
  /// Adds the seconds since the last call of either function.
  void add_lap(double& sum) {
    const auto now = Clock::now();
    sum += std::chrono::duration<double>(now - begin_).count();
    begin_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_;
};

/// Measures StepTime::own. Not thread-safe.
class OwnTimer {
 public:
  void start() { begin_ = dist::time_between_calls(); }
  /// Seconds since start().
  double seconds() const;

 private:
  std::optional<std::chrono::nanoseconds> begin_;
};

/// The times of all ranks, by rank. Every rank calls it.
std::vector<StepTime> of_all_ranks(const StepTime& own);

}  // namespace syncbn::train
