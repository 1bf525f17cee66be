#pragma once

#include <syncbn/base/unique_fd.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "job/job_messages.h"
#include "job/rank_record.h"
#include "job/run_context.h"
#include "output/failure_report.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "workers/agent_reader.h"
#include "workers/node_agent.h"
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
  WorkerProcess& process;  ///< the NodeAgent's
  std::vector<std::string> argv = {};
  OutputPipes pipes = {};
  base::UniqueFd agent = {};  ///< the launcher's end of the agent channel
  AgentReader records = {};
  WorkerProgress progress = {};
  RankMemory calls = {};  ///< its flight record
};

/// How an attempt ended.
struct GroupResult {
  std::optional<FailureReport> failure = {};  ///< the first worker that failed
  std::string start_error = {};               ///< why that worker could not be started
  JobFailure cause = {};                      ///< what has ended the attempt, and the exit code
  /// The command that resumes the job; "" if a worker has printed it, empty if none is known.
  std::optional<std::string> resume = {};
};

/// Appends {"event":"end","time":...,"reason":...} to a worker's log, on a line of its own. Does
/// nothing if the log cannot be written, or says that the run has finished or stopped in order.
void note_end(const std::string& log, const std::string& reason, Output& output);

/// Why a worker could not be started. @param file the path for execve.
std::string describe_start_error(const WorkerProcess& worker, const std::string& file);

/// Adds to the report of the first failure, which has its local rank and time, all that is known,
/// log files included. Keeps the log folder if the report refers to an error file in it.
void complete(FailureReport& report, const std::vector<Worker>& workers, LogFolder& logs,
              const Output& output);

/// Writes a file of flight records to the log folder, in place of one that this attempt has there.
/// If the options ask for no logs, only that of the latest attempt stays. Returns the path, or ""
/// if there are no records, the options discard them, or they cannot be written.
std::string save_flight_file(const FlightFile& file, LogFolder& logs, Output& output);
/// Writes the workers' flight records. Returns the file, or "" if there are none.
std::string write_flight_file(const std::string& why, const RunContext& context,
                              const std::vector<Worker>& workers, LogFolder& logs, Output& output);

}  // namespace syncbn::launch
