#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "output/output.h"

namespace syncbn::launch {

/// What is known about the first failure of a run.
struct FailureReport {
  int rank = 0;
  int local_rank = 0;
  std::string host;
  pid_t pid = 0;
  std::vector<std::string> argv;
  int wait_status = 0;
  bool out_of_memory = false;  ///< probably killed by the kernel for lack of memory
  std::string hang;            ///< why the launcher killed it: it held up the others; or ""
  std::chrono::system_clock::time_point time;
  double seconds_after_start = 0;
  std::vector<std::string> stderr_tail;
  bool tail_was_shown = false;  ///< directly above the report, which then does not repeat it
  std::string error_message;    ///< from the worker's error file
  std::string error_file;
  std::string flight_file;              ///< for `syncbn-launch explain`; "": none
  std::vector<std::string> failed_too;  ///< "rank 3 (exit code 1)"
  std::vector<std::string> ended;       ///< by the launcher
};

/// Cuts a long message and adds a note that names the file with the whole.
std::string cut_message(const std::string& message, const std::string& file, size_t max_bytes,
                        size_t max_lines = SIZE_MAX);

/// The first line of an error message, after ": "; "" without a message.
std::string brief(const std::string& message);
/// "rank 5 failed: exit code 70"
std::string summary_of(const FailureReport& report);

/// The report to print, with the beginning of a long error message. A usage error (exit code 2)
/// gets one line, because the worker has explained it.
std::string render_report(const FailureReport& report);

/// All fields under their names, with exit_code or signal in place of the wait status.
nlohmann::ordered_json json_of_failure(const FailureReport& failure);

/// How the run ended, as a JSON object: exit_code, restarts, and failure, which may be null.
std::string json_report(int exit_code, int restarts = 0,
                        const std::optional<FailureReport>& failure = {});

/// Writes json_report() to the file of --report, if it is not empty, and waits for it. An error is
/// printed, and does not change the run's exit code.
void write_report(Output& output, const std::string& file, const std::string& json);

}  // namespace syncbn::launch
