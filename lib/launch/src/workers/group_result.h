#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "common/processes.h"
#include "job/job_messages.h"
#include "job/rank_record.h"
#include "job/run_context.h"
#include "output/failure_report.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "workers/agent_reader.h"
#include "workers/worker_progress.h"

namespace syncbn::launch {

/// Tells whether the kernel's out-of-memory killer has killed processes since this object was made,
/// from counters of our control group, which is also the workers': memory.events (version 2) or
/// memory.oom_control (version 1). If neither can be read, the counter is the whole machine's
/// (/proc/vmstat).
class OomWatch {
 public:
  OomWatch();
  /// Whether a process with this wait status was probably killed for lack of memory.
  bool killed(int wait_status) const;

 private:
  uint64_t kills() const;

  std::filesystem::path file_;
  uint64_t before_ = 0;
};

/// A worker of this node in one attempt.
struct Worker {
  int rank = 0;
  pid_t pid = 0;
  std::vector<std::string> argv;  ///< with the program's path first, for reports
  bool running = true;
  std::optional<int> start_error;  ///< errno of a failed fork, binding or exec
  bool bind_failed = false;
  std::optional<int> wait_status;
  bool ended_by_us = false;
  std::string hang;  ///< Hang::text, if it was killed for that
  OutputPipes pipes;
  base::UniqueFd agent;  ///< the launcher's end of the agent channel
  AgentReader records;
  WorkerProgress progress;
  RankMemory calls;  ///< its flight record
};

/// How an attempt ended.
struct GroupResult {
  int exit_code = 0;
  std::optional<FailureReport> failure = {};  ///< the first worker that failed
  std::string start_error = {};               ///< why that worker could not be started
  std::optional<int> signal = {};             ///< sent to the launcher, before or after the failure
  JobFailure cause = {};                      ///< what has ended the attempt, once printed
  /// The command that resumes the job; "" if a worker has printed it, empty if none is known.
  std::optional<std::string> resume = {};
};

struct FirstFailure {
  size_t worker = 0;  ///< its index, which is its local rank
  std::chrono::system_clock::time_point time;
  double seconds_after_start = 0;
};

/// Appends {"event":"end","time":...,"reason":...} to a worker's log, on a line of its own. Does
/// nothing if the log cannot be written, or says that the run has finished or stopped in order.
void note_end(const std::string& log, const std::string& reason, Output& output);

/// The result if a worker could not be started. @param file the path for execve.
GroupResult start_failure(const Worker& worker, const std::string& file, const JobFailure& cause);

/// Collects what is known about the first failure, log files included. Keeps the log folder if the
/// report refers to an error file in it.
FailureReport report_of(const FirstFailure& failure, const std::vector<Worker>& workers,
                        LogFolder& logs, const Output& output, const OomWatch& oom);

/// Writes a file of flight records to the log folder, in place of one that this attempt has there.
/// If the options ask for no logs, only that of the latest attempt stays. Returns the path, or ""
/// if there are no records, or the options discard them.
std::string save_flight_file(const FlightFile& file, LogFolder& logs, Output& output);
/// Writes the workers' flight records. Returns the file, or "" if there are none.
std::string write_flight_file(const std::string& why, const RunContext& context,
                              const std::vector<Worker>& workers, LogFolder& logs, Output& output);

}  // namespace syncbn::launch
