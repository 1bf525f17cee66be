#include "output/failure_report.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/wait.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/processes.h"
#include "common/words.h"

namespace syncbn::launch {
namespace {

// Upper bounds on the error message in a printed report.
constexpr size_t kMaxShownBytes = 8192;
constexpr size_t kMaxShownLines = 40;

std::string local_time(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  return fmt::format("{:%Y-%m-%d %H:%M:%S}", *std::localtime(&seconds));
}

std::string indented(const std::string& text) {
  std::string result;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) result += "    " + line + "\n";
  return result;
}

/// A line of glog or of libtorch below "error": "[W1127 06:00:00.123456789 socket.cpp:1] slow".
bool is_warning(const std::string& line) {
  constexpr std::string_view kPrefix = "L0000 00:00:00";
  const std::string_view prefix =
      std::string_view(line).substr(line.starts_with('[') ? 1 : 0, kPrefix.size());
  return std::ranges::equal(prefix, kPrefix, [](char c, char wanted) {
    if (wanted == '0') return c >= '0' && c <= '9';
    return wanted == 'L' ? c == 'I' || c == 'W' : c == wanted;
  });
}

}  // namespace

std::string cut_message(const std::string& message, const std::string& file, size_t max_bytes,
                        size_t max_lines) {
  size_t end = std::min(message.size(), max_bytes);
  size_t lines = 0;
  for (size_t at = 0; (at = message.find('\n', at)) < end; ++at) {
    if (++lines == max_lines) end = at;
  }
  if (message.size() <= end + 1) return message;
  return fmt::format("{}\n[cut here; the full message is in {}]", base::utf8_prefix(message, end),
                     file);
}

std::string brief(const std::string& message) {
  constexpr size_t kMaxBytes = 500;
  const std::string line = base::printable(message.substr(0, message.find('\n')));
  return line.empty() ? "" : fmt::format(": {}", base::utf8_prefix(line, kMaxBytes));
}

std::string summary_of(const FailureReport& report) {
  if (!report.hang.empty()) {
    return fmt::format("rank {} failed: it made no progress (--hang_timeout) and was killed",
                       report.rank);
  }
  return fmt::format("rank {} failed: {}", report.rank,
                     ExitStatus{report.wait_status, report.out_of_memory}.in_words());
}

std::string render_report(const FailureReport& report) {
  const int exit_code = exit_code_of(report.wait_status);
  if (WIFEXITED(report.wait_status) && !restart_may_help(report.wait_status)) {
    return fmt::format("syncbn-launch: rank {} exited with {} ({}; see the message above)\n",
                       report.rank, exit_code,
                       exit_code == base::kExitUsage
                           ? "usage or configuration error"
                           : "asked to stop, it has saved what there was");
  }
  std::string text = fmt::format("syncbn-launch: {}\n", summary_of(report));
  const auto line = [&text](std::string_view name, std::string_view value) {
    text += fmt::format("  {:<12}{}\n", name, value);
  };
  line("worker", fmt::format("rank {}, local rank {}, pid {}, host {}", report.rank,
                             report.local_rank, report.pid, report.host));
  line("command", shell_quoted(report.argv));
  line("time", fmt::format("{}, {} after the start", local_time(report.time),
                           base::format_seconds(report.seconds_after_start)));
  if (!report.hang.empty()) line("hang", report.hang);
  const std::string message_begin = report.error_message.substr(0, report.error_message.find('\n'));
  const bool is_in_tail = !message_begin.empty() &&
                          std::ranges::any_of(report.stderr_tail, [&](const std::string& one) {
                            return one.ends_with(message_begin);
                          });
  if (!report.error_message.empty() && !is_in_tail) {
    line("error", fmt::format("(from {})", report.error_file));
    const std::string message =
        cut_message(report.error_message, report.error_file, kMaxShownBytes, kMaxShownLines);
    // The terminal must not obey its control characters.
    text += indented(base::printable(message, "\n\t"));
  }
  // Warnings do not give the reason for the failure.
  const bool has_only_warnings = std::ranges::all_of(report.stderr_tail, is_warning);
  if (!has_only_warnings && !report.tail_was_shown) {
    const size_t lines = report.stderr_tail.size();
    line("stderr", lines == 1 ? "(its last line)" : fmt::format("(its last {} lines)", lines));
    text += indented(base::join(report.stderr_tail, "\n"));
  }
  if (!report.flight_file.empty()) {
    line("collectives", shell_quoted({"syncbn-launch", "explain", report.flight_file}));
  }
  if (!report.failed_too.empty()) line("failed too", base::join(report.failed_too, ", "));
  if (!report.ended.empty()) line("then ended", base::join(report.ended, ", "));
  return text;
}

nlohmann::ordered_json json_of_failure(const FailureReport& failure) {
  const int status = failure.wait_status;
  const bool exited = WIFEXITED(status);
  return {{"rank", failure.rank},
          {"local_rank", failure.local_rank},
          {"host", failure.host},
          {"pid", failure.pid},
          {"command", failure.argv},
          {exited ? "exit_code" : "signal", exited ? WEXITSTATUS(status) : WTERMSIG(status)},
          {"out_of_memory", failure.out_of_memory},
          {"hang", failure.hang},
          {"time", std::chrono::duration<double>(failure.time.time_since_epoch()).count()},
          {"seconds_after_start", failure.seconds_after_start},
          {"stderr_tail", failure.stderr_tail},
          {"error_message", failure.error_message},
          {"error_file",
           failure.error_message.empty() || !restart_may_help(status) ? "" : failure.error_file},
          {"flight_file", failure.flight_file},
          {"failed_too", failure.failed_too},
          {"ended", failure.ended}};
}

std::string json_report(int exit_code, int restarts, const std::optional<FailureReport>& failure) {
  const nlohmann::ordered_json json{{"exit_code", exit_code},
                                    {"restarts", restarts},
                                    {"failure", failure ? json_of_failure(*failure) : nullptr}};
  // A worker's output may not be UTF-8.
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

void write_report(Output& output, const std::string& file, const std::string& json) {
  if (file.empty()) return;
  output.files().add(
      file, [file, json] { base::write_file_atomically(file, json); },
      [&output](const std::string& what) { output.announce("--report: {}", what); });
  output.finish_files();
}

}  // namespace syncbn::launch
