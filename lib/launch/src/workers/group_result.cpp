#include "workers/group_result.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/shell.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/descriptors.h"
#include "common/json_messages.h"
#include "job/flight_file.h"

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

fs::path counter_file() {
  const fs::path root = "/sys/fs/cgroup";
  for (const auto& [controllers, group] : base::control_groups()) {
    const bool is_v2 = controllers.empty();
    if (!is_v2 && controllers != "memory") continue;
    // In a container the path may be the host's, while the container's group is mounted as root.
    for (const fs::path& path : {group.relative_path(), fs::path()}) {
      fs::path file =
          is_v2 ? root / path / "memory.events" : root / "memory" / path / "memory.oom_control";
      if (std::ifstream(file).good()) return file;
    }
  }
  return "/proc/vmstat";
}

/// Whether a log's last line says that the run has finished, or stopped in order.
bool has_ended_otherwise(const std::string& tail) {
  const size_t end = tail.find_last_not_of('\n') + 1;
  const size_t begin = end == 0 ? 0 : tail.rfind('\n', end - 1) + 1;
  const auto line = parse_json(std::string_view(tail).substr(begin, end - begin));
  return line.is_object() && line.value("event", nlohmann::json()) == "end" &&
         line.value("reason", nlohmann::json()).is_string() &&
         !line["reason"].get<std::string>().starts_with("an error");
}

void append_end(const std::string& log, const std::string& reason) {
  const base::UniqueFd fd(
      ::open(log.c_str(), O_RDWR | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY));
  struct stat what {};
  if (!fd || ::fstat(fd.get(), &what) != 0 || !S_ISREG(what.st_mode)) return;
  constexpr off_t kTail = 4096;
  const std::string tail = read_at(fd.get(), std::max<off_t>(0, what.st_size - kTail), kTail);
  if ((tail.empty() && what.st_size > 0) || has_ended_otherwise(tail)) return;
  const nlohmann::ordered_json line{
      {"event", "end"}, {"time", static_cast<double>(base::unix_ns()) / 1e9}, {"reason", reason}};
  const std::string text =
      (tail.empty() || tail.ends_with('\n') ? "" : "\n") + json_line(line) + "\n";
  // A disk may be full.
  [[maybe_unused]] const ssize_t written = ::write(fd.get(), text.data(), text.size());
}

}  // namespace

OomWatch::OomWatch() : file_(counter_file()), before_(kills()) {}

bool OomWatch::killed(int wait_status) const {
  return WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL && kills() > before_;
}

uint64_t OomWatch::kills() const {
  return std::strtoull(value_in(file_, "oom_kill ").c_str(), nullptr, 10);
}

void note_end(const std::string& log, const std::string& reason, Output& output) {
  output.write_file(log, [log, reason] { append_end(log, reason); });
}

std::string describe_start_error(const WorkerProcess& worker, const std::string& file) {
  const int error = *worker.start_error;
  if (!worker.wait_status) {
    return fmt::format("cannot start rank {}: {}", worker.rank, base::describe_errno(error));
  }
  if (worker.bind_failed) {
    return fmt::format(
        "cannot bind rank {} to its cores: {} (its CPU set has changed since the launcher "
        "started?)",
        worker.rank, std::strerror(error));
  }
  std::string hint;
  if (error == ENOEXEC) hint = " (a script has to begin with #! and its interpreter)";
  if (error == ENOENT) hint = " (its interpreter, after #!, does not exist)";
  return fmt::format("cannot execute {}: {}{}", file, std::strerror(error), hint);
}

void complete(FailureReport& report, const std::vector<Worker>& workers, LogFolder& logs,
              const Output& output) {
  // Upper bound on the error message, which a node sends to its head.
  constexpr size_t kMaxErrorBytes = 1 << 16;
  const auto index = static_cast<size_t>(report.local_rank);
  const WorkerProcess& worker = workers[index].process;
  report.rank = worker.rank;
  report.host = base::hostname();
  report.pid = worker.pid;
  report.argv = base::without_secrets(workers[index].argv);
  report.wait_status = *worker.wait_status;
  report.hang = worker.hang;
  report.out_of_memory = worker.hang.empty() && worker.out_of_memory;
  report.error_file = logs.error_file(report.local_rank);
  report.error_message =
      cut_message(logs.error_message(report.local_rank), report.error_file, kMaxErrorBytes);
  // The report of a mistake does not name the file.
  if (!report.error_message.empty() && restart_may_help(report.wait_status)) logs.keep();
  report.stderr_tail = output.tail(index);
  report.tail_was_shown = output.tail_is_last(index);
  if (report.stderr_tail.empty()) {
    // stderr may be redirected to a file.
    report.stderr_tail =
        LogFolder::tail(logs.of_worker(report.local_rank) / "stderr.log", Output::kTailLines);
  }
  for (const Worker& one : workers) {
    const WorkerProcess& other = one.process;
    if (&other == &worker || !other.wait_status) continue;
    const std::string end =
        fmt::format("rank {} ({})", other.rank, ExitStatus{other.wait_status}.in_words());
    if (other.ended_by_us) {
      report.ended.push_back(end);
    } else if (*other.wait_status != 0) {
      report.failed_too.push_back(end);
    }
  }
}

std::string save_flight_file(const FlightFile& file, LogFolder& logs, Output& output) {
  constexpr const char* kName = "flight.jsonl";
  const auto path = logs.file(logs.attempt(), kName);
  if (path == "/dev/null" || file.records.empty()) return "";
  const auto former = logs.is_wanted() ? std::vector<fs::path>() : logs.former(kName);
  const auto written = std::make_shared<std::atomic<bool>>(false);
  output.write_file(path, [path, former, file, written] {
    base::write_file_atomically(path, file.text());
    *written = true;
    std::error_code ignored;
    for (const fs::path& one : former) fs::remove(one, ignored);
  });
  // So that a report does not name a file that could not be written.
  constexpr std::chrono::seconds kPatience{3};
  const bool has_ended = output.files().wait(kPatience);
  if (has_ended && !*written) return "";
  logs.keep();
  return path;
}

std::string write_flight_file(const std::string& why, const RunContext& context,
                              const std::vector<Worker>& workers, LogFolder& logs, Output& output) {
  FlightFile file{.job = context.job_id,
                  .attempt = context.attempt,
                  .world_size = context.ranks.world_size,
                  .why = why};
  for (const Worker& worker : workers) {
    auto record = worker.calls.read();
    if (record && !record->calls.empty()) file.records.emplace(record->rank, *record);
  }
  return save_flight_file(file, logs, output);
}

}  // namespace syncbn::launch
