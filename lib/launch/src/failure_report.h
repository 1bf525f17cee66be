#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace syncbn::launch {

/// Everything that is known about the first failure of a run.
struct FailureReport {
  int rank = 0;
  int local_rank = 0;
  std::string host;
  pid_t pid = 0;
  std::vector<std::string> argv;
  int wait_status = 0;
  std::chrono::system_clock::time_point time;
  double seconds_after_start = 0;
  std::vector<std::string> stderr_tail;  ///< empty where it need not be repeated
  std::string error_message;             ///< out of the worker's error file
  std::string error_file;
  std::vector<std::string> failed_too;  ///< "rank 3 (exit code 1)"
  std::vector<std::string> ended;       ///< after the launcher's signal
};

/// The report as it is printed, one block of text. A usage error (exit code 2) has been explained
/// by the worker itself and gets one line.
std::string render_report(const FailureReport& report);

/// argv as one could type it into a shell.
std::string shell_quoted(const std::vector<std::string>& argv);

}  // namespace syncbn::launch
