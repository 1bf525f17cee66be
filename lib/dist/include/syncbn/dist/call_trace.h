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
  int peer = -1;             ///< of a send or recv, in the world; -1 for collectives
  int64_t begin = 0;         ///< when the rank made the call
  int64_t end = 0;           ///< when the result was there; on GPUs, when it was queued
  int64_t waited_from = -1;  ///< when a thread first blocked on the result; -1: none did
};

/// Records the calls of all groups of this process while it lives. At most one may exist at a time;
/// without one, a call only reads a flag. Thread-safe.
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

/// Time in which no thread of this process has waited for a call of a group, since the process
/// formed its first group, less the time that calls on GPUs took, as far as known: below 0 if calls
/// on GPUs overlapped. Empty without a flight record, which a launcher provides. Thread-safe.
std::optional<std::chrono::nanoseconds> time_between_calls();

}  // namespace syncbn::dist
