#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "common/clock.h"

namespace syncbn::launch {

/// Why an attempt has failed, as far as it can be compared with earlier ones.
struct FailureCause {
  int rank = -1;      ///< of the worker that failed first; -1: none
  int status = 0;     ///< its wait status; SIGKILL for a worker that made no progress
  int64_t step = -1;  ///< of that rank; 0: it has reported none; -1: it was killed from outside

  bool operator==(const FailureCause&) const = default;
  /// "rank 1 failed (exit code 1)".
  std::string describe() const;
};

/// Decides whether and when a failed attempt is followed by another. Not thread-safe.
class RestartPolicy {
 public:
  /// After this many consecutive failures with the same cause at the same step, a restart does not
  /// help.
  static constexpr int kMaxSame = 3;
  /// The same for failures soon after the start, without any step. It is larger because what a
  /// program needs at its start, such as a file server, may be unavailable for a while: the waits
  /// before the restarts add up to 91 s.
  static constexpr int kMaxSameAtStart = 10;

  /// @param max_restarts within `window`; within the run if that is 0.
  RestartPolicy(int max_restarts, std::chrono::milliseconds window)
      : max_restarts_(max_restarts), window_(window) {}

  void attempt_started(Clock::time_point now) { started_ = now; }
  void failed(const FailureCause& cause, Clock::time_point now);
  /// Why there is no restart after the last failure, or "".
  std::string refusal() const;
  /// Counts a restart after the last failure. Returns the wait before it, which grows with the
  /// number of consecutive attempts that failed within kQuick.
  std::chrono::milliseconds restart();

 private:
  static constexpr std::chrono::seconds kQuick{60};

  const int max_restarts_;
  const std::chrono::milliseconds window_;
  std::deque<Clock::time_point> restarts_;  ///< the times of the failures before them
  Clock::time_point started_;
  Clock::time_point failed_;
  FailureCause last_;
  int same_ = 0;   ///< failures in a row that equal last_
  int quick_ = 0;  ///< attempts in a row that failed within kQuick
};

}  // namespace syncbn::launch
