#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::dist {

/// A collective, send or recv as this rank saw it. Times are in nanoseconds of the host's
/// CLOCK_REALTIME.
struct TracedCall {
  std::string name;          ///< "all_reduce", or what SyncBatchNorm calls the layer's exchange
  std::string group;         ///< its name, the same on all ranks
  int peer = -1;             ///< of a send or recv, in the world; -1 for collectives
  uint64_t sequence = 0;     ///< of collectives the number in the group, the same on all ranks
  int64_t bytes = 0;         ///< of this rank's tensor
  int64_t begin = 0;         ///< when the rank made the call
  int64_t end = 0;           ///< when the result was there; on GPUs, when it was queued
  int64_t waited_from = -1;  ///< when a thread began to wait for the result; -1: by no Work::wait()
};

/// Records the calls of all groups of this process while it lives: one at a time in a process.
/// Without one, a call costs the read of a flag more. Thread-safe.
class CallTrace {
 public:
  /// Upper bound on the calls that wait for take(), about 30 MB. Later ones are dropped, with a
  /// warning.
  static constexpr size_t kMaxCalls = 200'000;

  CallTrace();
  ~CallTrace();
  CallTrace(const CallTrace&) = delete;
  CallTrace& operator=(const CallTrace&) = delete;

  /// The calls that have ended since the last take(), in the order of their ends.
  std::vector<TracedCall> take();
};

/// How long no thread of this process has waited for a call of a group, since its first group was
/// formed, less the time that calls took on GPUs, as far as it is known by now: below 0 if calls
/// overlapped. Empty without a flight record, which a launcher provides. Thread-safe.
std::optional<std::chrono::nanoseconds> time_between_calls();

}  // namespace syncbn::dist
