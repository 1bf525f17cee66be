#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>
#include <sys/types.h>

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "job/run_context.h"
#include "machine/cpus.h"
#include "output/failure_report.h"
#include "output/log_folder.h"
#include "output/output.h"

namespace syncbn::launch {

/// The run's course in lines of JSON, as --event_log_handler asks; docs/launch.md lists the events.
/// Each line is one write, made when the event happens; the log of a launcher that is killed just
/// ends.
class EventLog {
 public:
  /// @param context are read with each event: node, attempt.
  /// @throws base::UserError or base::UnavailableError when the file cannot be opened.
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
    bool by_launcher = false;  ///< after its signal
    std::string error;         ///< why there is no wait status, or no program behind it
  };

  void job_started();
  void attempt_started();
  void worker_started(int rank, int local_rank, pid_t pid);
  void worker_ended(const WorkerEnd& end);
  /// @param failure of a worker that had been started.
  void failure(const std::string& what, const std::optional<FailureReport>& failure);
  /// @param reason empty: the failure before it.
  void restart(const std::string& reason);
  /// @param reason empty when all went well.
  void job_ended(int exit_code, const std::string& reason);

 private:
  void write(const char* event, const nlohmann::ordered_json& fields);
  void write_line(const std::string& line);

  const LaunchOptions& options_;
  const RunContext& context_;
  Output& output_;
  const std::chrono::steady_clock::time_point started_;
  bool knows_node_;
  bool knows_job_;
  std::string path_;
  base::UniqueFd file_;
};

}  // namespace syncbn::launch
