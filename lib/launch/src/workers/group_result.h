#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "output/failure_report.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "workers/oom_watch.h"
#include "workers/worker.h"

namespace syncbn::launch {

/// How an attempt ended.
struct GroupResult {
  int exit_code = 0;
  std::optional<FailureReport> failure = {};  ///< of the first worker that failed
  std::string start_error = {};               ///< why that worker could not even be started
  std::optional<int> signal = {};             ///< that the launcher got, before or after it
  std::string of_job = {};                    ///< with several nodes: the job's first failure
};

/// The first worker that failed, and when.
struct FirstFailure {
  size_t worker = 0;  ///< its index, which is its local rank
  std::chrono::system_clock::time_point time;
  double seconds_after_start = 0;
};

/// The result when a worker could not be started. @param file that it should have executed.
GroupResult start_failure(const Worker& worker, const std::string& file);

/// All that is known of the first failure, out of log files, too. Keeps these where they say more.
FailureReport report_of(const FirstFailure& failure, const std::vector<Worker>& workers,
                        LogFolder& logs, const Output& output, const OomWatch& oom);

}  // namespace syncbn::launch
