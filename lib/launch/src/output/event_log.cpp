#include "output/event_log.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/shell.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/json_messages.h"

namespace syncbn::launch {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string utc(std::chrono::system_clock::time_point time) {
  using std::chrono::milliseconds;
  const auto since_epoch = std::chrono::duration_cast<milliseconds>(time.time_since_epoch());
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(time)),
                     since_epoch.count() % 1000);
}

OrderedJson or_null(const std::string& text) {
  return text.empty() ? OrderedJson() : OrderedJson(text);
}

std::string path_of(const LaunchOptions& options, const LogFolder& logs) {
  if (options.events == EventTarget::kFile) return options.events_file;
  if (options.events == EventTarget::kLogFolder) return logs.file(logs.path(), "events.jsonl");
  return "";
}

OpenFile open_log(const std::string& path) {
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  // O_NONBLOCK: opening a pipe that nobody reads must not block the run.
  base::UniqueFd file(::open(
      path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666));
  if (!file) base::throw_file_error(fmt::format("cannot open the event log {}", path), errno);
  ::fcntl(file.get(), F_SETFL, ::fcntl(file.get(), F_GETFL) & ~O_NONBLOCK);
  return {std::make_shared<base::UniqueFd>(std::move(file)), fmt::format("the event log {}", path)};
}

}  // namespace

EventLog::EventLog(const LaunchOptions& options, const RunContext& context, const LogFolder& logs,
                   Output& output)
    : options_(options),
      context_(context),
      output_(output),
      started_(Clock::now()),
      knows_node_(options.node_rank >= 0),
      knows_job_(context.nodes == 1) {
  if (const std::string path = path_of(options, logs); !path.empty()) file_ = open_log(path);
}

void EventLog::check(const LaunchOptions& options) {
  std::error_code ignored;
  // Closing a pipe would look like the end of the log to its reader.
  const bool is_pipe = std::filesystem::is_fifo(options.events_file, ignored);
  if (options.events == EventTarget::kFile && !is_pipe) open_log(options.events_file);
}

void EventLog::job_started() {
  // Other nodes may have other numbers of workers.
  const bool knows_world = options_.nnodes.max == 1;
  write("job_started",
        {{"launcher", "syncbn-launch " SYNCBN_VERSION},
         {"pid", ::getpid()},
         {"options", base::without_secrets(options_.given)},
         {"program", base::without_secrets(options_.program)},
         {"min_nodes", options_.nnodes.min},
         {"max_nodes", options_.nnodes.max},
         {"nproc_per_node", options_.nproc_per_node},
         {"world_size", knows_world ? OrderedJson(context_.ranks.world_size) : OrderedJson()},
         {"max_restarts", options_.max_restarts}});
}

void EventLog::nodes_joined(Clock::time_point when) {
  knows_node_ = knows_job_ = true;
  const std::chrono::duration<double> waited = when - started_;
  write("nodes_joined", {{"seconds", waited.count()}}, Clock::now() - when);
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
  const auto& cpus = context_.cpus;
  const auto index = static_cast<size_t>(local_rank);
  write("worker_started",
        {{"rank", rank},
         {"local_rank", local_rank},
         {"pid", pid},
         {"cpus", cpus.empty() ? OrderedJson() : OrderedJson(format_cpus(cpus.at(index)))}});
}

void EventLog::worker_ended(const WorkerEnd& end) {
  const bool exited = end.wait_status && WIFEXITED(*end.wait_status);
  const bool killed = end.wait_status && !exited;
  write("worker_ended",
        {{"rank", end.rank},
         {"local_rank", end.local_rank},
         {"pid", end.pid},
         {"exit_code", exited ? OrderedJson(WEXITSTATUS(*end.wait_status)) : OrderedJson()},
         {"signal", killed ? OrderedJson(WTERMSIG(*end.wait_status)) : OrderedJson()},
         {"seconds", end.seconds},
         {"by_launcher", end.by_launcher},
         {"error", or_null(end.error)}});
}

void EventLog::failure(const std::string& what, const std::optional<FailureReport>& failure) {
  write("failure",
        {{"what", what}, {"failure", failure ? json_of_failure(*failure) : OrderedJson()}});
}

void EventLog::restart(const std::string& reason) {
  write("restart", {{"restarts", context_.restart_count},
                    {"max_restarts", options_.max_restarts},
                    {"reason", or_null(reason)}});
}

void EventLog::job_ended(int exit_code, const std::string& reason) {
  const std::chrono::duration<double> lasted = Clock::now() - started_;
  write("job_ended",
        {{"exit_code", exit_code}, {"reason", or_null(reason)}, {"seconds", lasted.count()}});
}

void EventLog::write(const char* event, const OrderedJson& fields, Clock::duration ago) {
  if (options_.events == EventTarget::kNone) return;
  using SystemClock = std::chrono::system_clock;
  const auto time = SystemClock::now() - std::chrono::duration_cast<SystemClock::duration>(ago);
  OrderedJson json{{"time", utc(time)},
                   {"event", event},
                   {"host", base::hostname()},
                   {"run_id", context_.run_id},
                   {"job_id", knows_job_ ? OrderedJson(context_.job_id) : OrderedJson()},
                   {"node_rank", knows_node_ ? OrderedJson(context_.node) : OrderedJson()},
                   {"attempt", context_.attempt}};
  json.update(fields);
  const std::string line = json_line(json) + "\n";
  if (options_.events == EventTarget::kConsole) return output_.say(line);
  if (!file_.fd) return;
  output_.files().append(file_, line, [this](const std::string& what) {
    if (std::exchange(file_.fd, nullptr)) output_.announce("{}; it ends here", what);
  });
}

}  // namespace syncbn::launch
