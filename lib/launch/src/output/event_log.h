#pragma once

#include <syncbn/launch/options.h>
#include <sys/types.h>

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "common/clock.h"
#include "job/run_context.h"
#include "output/failure_report.h"
#include "output/log_folder.h"
#include "output/output.h"

namespace syncbn::launch {

/// Writes the events of a run as lines of JSON, for --event_log_handler; docs/launch.md lists them.
/// Each event is one write() at its time, so the log of a launcher that is killed has nearly all
/// events up to then.
class EventLog {
 public:
  /// @param context read at each event, for the node and the attempt.
  /// @throws base::UserError or base::UnavailableError if the file cannot be opened.
  EventLog(const LaunchOptions& options, const RunContext& context, const LogFolder& logs,
           Output& output);
  /// Throws what the constructor would.
  static void check(const LaunchOptions& options);

  struct WorkerEnd {
    int rank = 0;
    int local_rank = 0;
    pid_t pid = 0;
    std::optional<int> wait_status;
    double seconds = 0;
    bool by_launcher = false;  ///< the launcher had sent it a signal to end
    std::string error;         ///< why it did not start, or did not end
  };

  void job_started();
  /// Called on node 0: from then on, events carry this node's rank and the job's id.
  void nodes_joined();
  void attempt_started();
  void worker_started(int rank, int local_rank, pid_t pid);
  void worker_ended(const WorkerEnd& end);
  /// @param failure empty if the worker could not be started.
  void failure(const std::string& what, const std::optional<FailureReport>& failure);
  /// @param reason empty if the preceding failure is the reason.
  void restart(const std::string& reason);
  /// @param reason empty after success.
  void job_ended(int exit_code, const std::string& reason);

 private:
  void write(const char* event, const nlohmann::ordered_json& fields);

  const LaunchOptions& options_;
  const RunContext& context_;
  Output& output_;
  const Clock::time_point started_;
  bool knows_node_;  ///< events may carry this node's rank
  bool knows_job_;   ///< events may carry the job's id; true once an attempt has started
  OpenFile file_;    ///< closed: no file is wanted, or it could not be written
};

}  // namespace syncbn::launch
