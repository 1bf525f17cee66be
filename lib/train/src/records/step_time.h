#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include <syncbn/dist/call_trace.h>

namespace syncbn::train {

/// What a rank's steps cost, and where they spend their time: means in seconds. What is left of
/// `whole` is the rest: the copy to the device, clipping, the vote.
struct StepTime {
  double whole = 0;
  double data = 0;       ///< waiting for the batch
  double forward = 0;    ///< with the exchange of batch norm's statistics
  double backward = 0;   ///< the same
  double exchange = 0;   ///< of gradients, as far as backward does not hide it
  double optimizer = 0;  ///< 0 on GPUs, where it is part of the rest
  /// In which no thread waited for other ranks: the rank with the most holds up the others. 0 on
  /// GPUs, and without a launcher.
  double own = 0;
  double memory_bytes = 0;  ///< that the process has had in RAM at most
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

/// By rank. Every rank calls it.
std::vector<StepTime> of_all_ranks(const StepTime& own);

}  // namespace syncbn::train
