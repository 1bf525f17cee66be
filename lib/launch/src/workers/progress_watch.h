#pragma once

#include <poll.h>
#include <syncbn/base/progress_bar.h>
#include <syncbn/launch/options.h>

#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "job/worker_state.h"
#include "nodes/node_link.h"
#include "output/output.h"
#include "workers/group_result.h"

namespace syncbn::launch {

/// Reads what the workers of this node report over their agent channels and flight records: draws
/// rank 0's progress bar, finds out when workers make no progress, and which ranks are slow. Not
/// thread-safe.
class ProgressWatch {
 public:
  /// What it refers to must outlive this object.
  ProgressWatch(const LaunchOptions& options, Output& output, NodeLink& link, int attempt,
                std::vector<Worker>& workers, Clock::time_point now);

  /// Adds the channels of workers that have not reported yet. The others are read at due().
  void add_to(std::vector<pollfd>& polls) const;
  Clock::time_point due() const;

  /// Reads the records that are due, and draws the bar.
  void read_all();
  /// Reads what has arrived from a worker.
  void read(Worker& worker);
  /// What the workers do now.
  std::vector<WorkerState> states();

  /// Whether to call check() now.
  bool is_due() const { return Clock::now() >= next_check_; }
  /// Returns lines for the user.
  /// @param judges whether to look for workers that make no progress. The job's leader, which is
  ///   told of them, decides which one holds up the others.
  std::vector<std::string> check(bool judges, Clock::time_point now);
  /// A hang is named once, unless the timeout ends a worker.
  void hang_was_named(bool stops_time);
  /// If this process did not run, because it was stopped or the machine slept, the workers perhaps
  /// did not run either: that time does not count.
  void forgive_own_silence(Clock::time_point now);
  /// Begins to count anew.
  void forgive_silence();

 private:
  void judge(Clock::time_point now);
  void warn_of_silence(Clock::time_point now);
  std::chrono::milliseconds timeout() const {
    return options_.hang_timeout.value_or(std::chrono::milliseconds(0));
  }

  const LaunchOptions& options_;
  Output& output_;
  NodeLink& link_;
  const int attempt_;
  std::vector<Worker>& workers_;
  const Clock::time_point started_;
  base::ProgressBar bar_;
  std::optional<Clock::time_point> next_records_;  ///< when to read them, after the first one
  Clock::time_point next_check_;
  Clock::time_point next_stall_report_;
  Clock::time_point next_naming_;
  std::vector<std::string> lines_;  ///< for check()
  bool hang_was_named_ = false;
  bool warned_of_timeout_ = false;
  bool warned_of_silence_ = false;
};

}  // namespace syncbn::launch
