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
  std::optional<FailureReport> failure = {};  ///< the first worker that failed
  std::string start_error = {};               ///< why that worker could not be started
  std::optional<int> signal = {};             ///< sent to the launcher, before or after the failure
  std::string of_job = {};                    ///< the job's first failure if it is another node's
};

struct FirstFailure {
  size_t worker = 0;  ///< its index, which is its local rank
  std::chrono::system_clock::time_point time;
  double seconds_after_start = 0;
};

/// The result if a worker could not be started. @param file the path for execve.
GroupResult start_failure(const Worker& worker, const std::string& file);

/// Collects what is known about the first failure, log files included. Keeps the log folder if the
/// report refers to an error file in it.
FailureReport report_of(const FirstFailure& failure, const std::vector<Worker>& workers,
                        LogFolder& logs, const Output& output, const OomWatch& oom);

}  // namespace syncbn::launch
