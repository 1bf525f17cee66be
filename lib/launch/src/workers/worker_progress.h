#pragma once

#include <syncbn/agent.h>

#include <cstdint>
#include <optional>
#include <string>

#include "common/clock.h"
#include "job/rank_record.h"
#include "job/worker_state.h"

namespace syncbn::launch {

/// What a worker's records over the agent channel, and its calls of lib/dist, tell about its
/// progress. Not thread-safe.
class WorkerProgress {
 public:
  void update(const syncbn_agent_record& record, Clock::time_point now);
  /// A call that begins or ends is progress.
  void update(const RankMemory::Counts& calls, Clock::time_point now);

  /// Whether it has sent any record.
  bool reports() const { return reports_; }
  /// Steps since the start of the run; empty if it has sent no record.
  std::optional<uint64_t> step() const { return reports_ ? std::optional(steps_) : std::nullopt; }
  /// How long it has made no progress, less what it has asked for; empty before its first step,
  /// unless it is in a call.
  std::optional<Clock::duration> stalled_for(Clock::time_point now) const;
  /// What it has asked for beyond the timeout.
  std::chrono::milliseconds allowance() const { return allowance_; }
  /// How long it may make no progress, as it has asked for; 0: no limit.
  std::chrono::milliseconds timeout() const { return timeout_; }
  /// The longest time between two records of progress, less what it had asked for.
  Clock::duration longest_step() const { return longest_step_; }
  /// What it has sent for use if the job fails.
  struct Notes {
    std::string log;     ///< the file that is to name the failure
    std::string resume;  ///< the command that continues the job
  };
  const Notes& notes() const { return notes_; }
  /// Deducts this much from the time without progress.
  void forgive(Clock::duration time) { since_ += time; }
  void forgive_all(Clock::time_point now) { since_ = now; }

  void describe(WorkerState& worker, Clock::time_point now) const;

 private:
  bool reports_ = false;
  uint64_t steps_ = 0;
  uint64_t bar_ = 0;  ///< done of the last PROGRESS
  uint64_t reported_ns_ = 0;
  uint64_t collective_ = 0;
  RankMemory::Counts calls_;
  std::string doing_;
  Notes notes_;
  bool in_phase_ = false;                  ///< which `doing_` names
  std::chrono::milliseconds allowance_{};  ///< that the worker has asked for, until its next record
  std::chrono::milliseconds timeout_{};
  Clock::time_point since_;  ///< its last progress
  Clock::duration longest_step_{};
};

}  // namespace syncbn::launch
