#include "output/event_log.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/env.h>
#include <syncbn/base/shell.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/descriptors.h"
#include "common/json_messages.h"

namespace syncbn::launch {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string utc_now() {
  const int64_t ms = base::unix_ns() / 1'000'000;
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(ms / 1000), ms % 1000);
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
  OpenFile file(path, "the event log");
  set_nonblocking(*file.fd);  // a pipe that is full ends this log, and no other
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

void EventLog::nodes_joined() {
  knows_node_ = knows_job_ = true;
  write("nodes_joined", {{"seconds", base::seconds_since(started_)}});
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
  write("job_ended", {{"exit_code", exit_code},
                      {"reason", or_null(reason)},
                      {"seconds", base::seconds_since(started_)}});
}

void EventLog::write(const char* event, const OrderedJson& fields) {
  if (options_.events == EventTarget::kNone) return;
  OrderedJson json{{"time", utc_now()},
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
