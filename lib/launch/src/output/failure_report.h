#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
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
  bool out_of_memory = false;  ///< the kernel killed for lack of memory in our control group
  std::chrono::system_clock::time_point time;
  double seconds_after_start = 0;
  std::vector<std::string> stderr_tail;
  bool tail_was_shown = false;  ///< just before the report, which need not repeat it
  std::string error_message;    ///< out of the worker's error file
  std::string error_file;
  std::vector<std::string> failed_too;  ///< "rank 3 (exit code 1)"
  std::vector<std::string> ended;       ///< after the launcher's signal
};

/// The beginning of a message that may be megabytes, with a note that names the file of the whole.
std::string cut_message(const std::string& message, const std::string& file, size_t most_bytes,
                        size_t most_lines = SIZE_MAX);

/// The report as it is printed, one block of text. A usage error (exit code 2) has been explained
/// by the worker itself and gets one line; of a long error message there is the beginning.
std::string render_report(const FailureReport& report);

/// What is known, shown or not; the keys are those of FailureReport, with exit_code or signal for
/// the wait status.
nlohmann::ordered_json json_of_failure(const FailureReport& failure);

/// How the run ended, as one JSON object: exit_code, restarts, and `failure` (null when there was
/// none).
std::string json_report(int exit_code, int restarts, const std::optional<FailureReport>& failure);

}  // namespace syncbn::launch
