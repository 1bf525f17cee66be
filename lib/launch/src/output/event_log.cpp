#include "output/event_log.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace syncbn::launch {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

std::string utc_now() {
  using std::chrono::milliseconds;
  const auto now = std::chrono::system_clock::now();
  const auto since_epoch = std::chrono::duration_cast<milliseconds>(now.time_since_epoch());
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", parts, since_epoch.count() % 1000);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string path_of(const LaunchOptions& options, const LogFolder& logs) {
  if (options.events == EventTarget::kFile) return options.events_file;
  if (options.events == EventTarget::kLogFolder) return logs.file(logs.path(), "events.jsonl");
  return "";
}

base::UniqueFd open_log(const std::string& path) {
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  // A pipe that nobody reads must not hold up the run.
  base::UniqueFd file(::open(
      path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666));
  if (!file) base::throw_file_error(fmt::format("cannot open the event log {}", path), errno);
  return file;
}

}  // namespace

EventLog::EventLog(const LaunchOptions& options, const RunContext& context, const LogFolder& logs,
                   Output& output)
    : options_(options),
      context_(context),
      output_(output),
      started_(Clock::now()),
      knows_node_(options.node_rank >= 0),
      knows_job_(context.nodes == 1),
      path_(path_of(options, logs)) {
  if (!path_.empty()) file_ = open_log(path_);
}

void EventLog::check(const LaunchOptions& options) {
  std::error_code ignored;
  // Whoever reads from a pipe would take our leaving for the end.
  if (options.events != EventTarget::kFile ||
      std::filesystem::is_fifo(options.events_file, ignored)) {
    return;
  }
  open_log(options.events_file);
}

void EventLog::job_started() {
  Json fields{{"launcher", "syncbn-launch " SYNCBN_VERSION},
              {"pid", ::getpid()},
              {"options", options_.given},
              {"program", options_.program},
              {"min_nodes", options_.nnodes.min},
              {"max_nodes", options_.nnodes.max},
              {"nproc_per_node", options_.nproc_per_node},
              {"world_size", nullptr},
              {"max_restarts", options_.max_restarts}};
  // Other nodes may have other numbers of workers.
  if (options_.nnodes.max == 1) fields["world_size"] = context_.ranks.world_size;
  write("job_started", fields);
}

void EventLog::attempt_started() {
  knows_node_ = knows_job_ = true;
  write("attempt_started", {{"nnodes", context_.nodes},
                            {"world_size", context_.ranks.world_size},
                            {"first_rank", context_.ranks.base},
                            {"workers", options_.nproc_per_node},
                            {"master_addr", context_.master_addr},
                            {"master_port", context_.master_port}});
}

void EventLog::worker_started(int rank, int local_rank, pid_t pid) {
  Json fields{{"rank", rank}, {"local_rank", local_rank}, {"pid", pid}, {"cpus", nullptr}};
  if (!context_.cpus.empty()) {
    fields["cpus"] = format_cpus(context_.cpus.at(static_cast<size_t>(local_rank)));
  }
  write("worker_started", fields);
}

void EventLog::worker_ended(const WorkerEnd& end) {
  Json fields{{"rank", end.rank},
              {"local_rank", end.local_rank},
              {"pid", end.pid},
              {"exit_code", nullptr},
              {"signal", nullptr},
              {"seconds", end.seconds},
              {"by_launcher", end.by_launcher},
              {"error", nullptr}};
  if (end.wait_status && WIFEXITED(*end.wait_status)) {
    fields["exit_code"] = WEXITSTATUS(*end.wait_status);
  } else if (end.wait_status) {
    fields["signal"] = WTERMSIG(*end.wait_status);
  }
  if (!end.error.empty()) fields["error"] = end.error;
  write("worker_ended", fields);
}

void EventLog::failure(const std::string& what, const std::optional<FailureReport>& failure) {
  write("failure",
        {{"what", what}, {"failure", failure ? json_of_failure(*failure) : Json(nullptr)}});
}

void EventLog::restart(const std::string& reason) {
  Json fields{{"restarts", context_.restart_count},
              {"max_restarts", options_.max_restarts},
              {"reason", nullptr}};
  if (!reason.empty()) fields["reason"] = reason;
  write("restart", fields);
}

void EventLog::job_ended(int exit_code, const std::string& reason) {
  Json fields{{"exit_code", exit_code}, {"reason", nullptr}, {"seconds", seconds_since(started_)}};
  if (!reason.empty()) fields["reason"] = reason;
  write("job_ended", fields);
}

void EventLog::write(const char* event, const Json& fields) {
  if (options_.events == EventTarget::kNone) return;
  Json line{{"time", utc_now()},          {"event", event},    {"host", base::hostname()},
            {"run_id", context_.run_id},  {"job_id", nullptr}, {"node_rank", nullptr},
            {"attempt", context_.attempt}};
  if (knows_job_) line["job_id"] = context_.job_id;
  if (knows_node_) line["node_rank"] = context_.node;
  line.update(fields);
  // Names and workers' words may be any bytes.
  write_line(line.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void EventLog::write_line(const std::string& line) {
  if (options_.events == EventTarget::kConsole) return output_.say(line);
  if (!file_) return;
  const std::string text = line + "\n";
  const ssize_t written = ::write(file_.get(), text.data(), text.size());
  if (written == static_cast<ssize_t>(text.size())) return;
  // The run matters more.
  output_.say(fmt::format("syncbn-launch: cannot write the event log {}: {}; it ends here", path_,
                          written < 0 ? std::strerror(errno) : "no room for a whole line"));
  file_.reset();
}

}  // namespace syncbn::launch
