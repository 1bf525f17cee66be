#include "supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "common/processes.h"
#include "output/failure_report.h"

namespace syncbn::launch {
namespace {

OutputOptions output_options(const LaunchOptions& options) {
  const Streams colours = options.colours.value_or(terminal_colours());
  OutputOptions result;
  result.out = {::isatty(STDOUT_FILENO) == 1, colours.out, options.duplicate_stdout_filters};
  result.err = {::isatty(STDERR_FILENO) == 1, colours.err, options.duplicate_stderr_filters};
  return result;
}

std::vector<WorkerOutput> worker_outputs(const LaunchOptions& options, const RunContext& context) {
  std::vector<WorkerOutput> workers;
  const auto& shown = options.local_ranks_filter;
  for (int local = 0; local < options.nproc_per_node; ++local) {
    WorkerOutput worker;
    worker.rank = context.ranks.base + local;
    // A single worker speaks for itself; its prompts and carriage returns pass as they are.
    if (context.ranks.world_size > 1) worker.prefix = line_prefix(options, worker.rank, local);
    worker.whole_lines = options.nproc_per_node > 1 || !worker.prefix.empty();
    worker.shown = shown.empty() || std::find(shown.begin(), shown.end(), local) != shown.end();
    workers.push_back(std::move(worker));
  }
  return workers;
}

// As torchrun, for a launcher that was started with @record around it.
void copy_error_file(const FailureReport& failure) {
  const auto wanted = base::env("TORCHELASTIC_ERROR_FILE");
  std::error_code ignored;
  if (!wanted || failure.error_message.empty()) return;
  std::filesystem::copy_file(failure.error_file, *wanted,
                             std::filesystem::copy_options::overwrite_existing, ignored);
}

// Empty when all went well.
std::string reason_of(const GroupResult& result) {
  if (!result.start_error.empty()) return result.start_error;
  if (result.failure) {
    return fmt::format("rank {} failed: {}", result.failure->rank,
                       describe_status(result.failure->wait_status));
  }
  if (result.signal) return fmt::format("ended by SIG{}", ::sigabbrev_np(*result.signal));
  return result.of_job;
}

}  // namespace

Supervisor::Supervisor(const LaunchOptions& options, const RunContext& context,
                       const Command& command, Cluster* cluster, SshNode* node)
    : options_(options),
      context_(context),
      command_(command),
      cluster_(cluster),
      node_(node),
      signals_(options.ending_signals, node != nullptr ? &node->head() : nullptr),
      logs_(options),
      output_(output_options(options)),
      events_(options, context_, logs_, output_) {}

int Supervisor::run() {
  if (logs_.is_wanted()) {
    const std::string host = node_ != nullptr ? " on " + options_.local_addr : "";
    output_.say(fmt::format("syncbn-launch: log files{} are in {}", host, logs_.path().string()));
  }
  events_.job_started();
  const GroupResult result = run_attempts();
  if (result.exit_code == base::kExitOk) {
    logs_.release_errors();
  } else if (last_.failure) {
    copy_error_file(*last_.failure);
  }
  events_.job_ended(result.exit_code, reason_of(result));
  logs_.clean_up();  // the keeper, which would remove it after a kill, has ended
  if (node_ != nullptr) {
    output_.say(node_->ended(result.exit_code, json_of(result)));
  } else {
    write_report(output_, options_.report, json_of(result));
  }
  return wait_for_reader(output_, signals_, result.exit_code, hurried_);
}

GroupResult Supervisor::run_attempts() {
  try {
    return cluster_ != nullptr ? run_with_others() : run_alone();
  } catch (const std::exception& error) {
    events_.job_ended(base::exit_code_of(error), error.what());
    throw;
  }
}

GroupResult Supervisor::run_alone() {
  for (;;) {
    GroupResult result = run_attempt();
    report(result);
    if (!may_restart(result)) return result;
    if (result.signal) return ended_instead_of_restart(*result.signal);
    ++context_.attempt;
    ++context_.restart_count;
    renew_master_port();
    events_.restart("");
    announce_restart();
  }
}

GroupResult Supervisor::run_with_others() {
  // Of a head's nodes each says by itself why its workers had to end.
  bool has_been_said = options_.voice == Voice::kOfItself;
  std::string said;
  for (;;) {
    logs_.clean_up();
    if (const auto signal = wait_for_orders()) {
      GroupResult result{.exit_code = base::kExitSignalBase + *signal, .signal = signal};
      report(result);
      return result;
    }
    if (const auto& finish = cluster_->finish()) {
      const bool is_news = !has_been_said && finish->what != said;
      if (finish->exit_code != base::kExitOk && !finish->what.empty() && is_news) {
        output_.say(fmt::format("syncbn-launch: error: {}", finish->what));
      }
      const bool failed_here = last_.failure || !last_.start_error.empty();
      // A node's reader is its head, which ends by itself.
      if (finish->exit_code != base::kExitOk && !failed_here && node_ == nullptr) hurried_ = true;
      // The report explains the exit code.
      if (!finish->is_ours) last_.failure.reset();
      return {.exit_code = finish->exit_code, .of_job = finish->what};
    }
    const auto start = cluster_->take_start();
    if (!start) continue;
    const int restarts_before = std::exchange(context_.restart_count, start->restarts);
    take_place(*start);
    if (start->attempt > 0) announce_attempt(*start, restarts_before);
    GroupResult result = run_attempt();
    if (options_.voice != Voice::kOwn) has_been_said = true;
    said = result.of_job;
    // Also after a signal: the others end in their own time, and the coordinator may be ours.
    cluster_->report_end();
    report(result);
  }
}

GroupResult Supervisor::run_attempt() {
  logs_.begin_attempt(context_.attempt);
  output_.begin_attempt(worker_outputs(options_, context_));
  if (!options_.duplicate_stdout_filters.empty()) {
    output_.copy_filtered(Stream::kOut, logs_.file(logs_.attempt(), "filtered_stdout.log"));
  }
  if (!options_.duplicate_stderr_filters.empty()) {
    output_.copy_filtered(Stream::kErr, logs_.file(logs_.attempt(), "filtered_stderr.log"));
  }
  events_.attempt_started();
  const WorkerGroup::Run run{options_, command_, signals_, output_, logs_, events_, cluster_};
  return WorkerGroup(run, context_).run();
}

std::optional<int> Supervisor::wait_for_orders() {
  bool signalled = false;
  for (;;) {
    cluster_->handle();
    for (const std::string& notice : cluster_->take_notices()) {
      if (options_.voice != Voice::kOfItself) output_.say(fmt::format("syncbn-launch: {}", notice));
    }
    if (cluster_->finish() || cluster_->has_start()) return std::nullopt;
    std::vector<pollfd> polls{{signals_.fd(), POLLIN, 0}, {cluster_->fd(), POLLIN, 0}};
    for (const int fd : output_.waits_for()) polls.push_back({fd, POLLOUT, 0});
    ::poll(polls.data(), polls.size(), base::milliseconds_until(cluster_->due()));
    output_.flush();
    while (const auto signal = signals_.next()) {
      if (*signal == SIGTSTP) {
        cluster_->pause();
        Signals::stop_self();
      }
      if (!signals_.ends(*signal)) continue;
      hurried_ = true;
      cluster_->report_signal(*signal);
      // The second time at once.
      if (std::exchange(signalled, true) || !cluster_->leads()) return signal;
    }
  }
}

void Supervisor::take_place(const Cluster::Start& start) {
  context_.attempt = start.attempt;
  if (!start.job_id.empty()) context_.job_id = start.job_id;
  context_.node = start.node;
  context_.nodes = start.nodes;
  context_.ranks = start.ranks;
  context_.master_addr = start.master_addr;
  context_.master_port = start.master_port;
  context_.agent_store = start.agent_store;
  if (!options_.nodes_may_change()) check_stdin(options_, context_.ranks.world_size);
}

bool Supervisor::may_restart(const GroupResult& result) const {
  return result.failure && context_.restart_count < options_.max_restarts &&
         result.exit_code != base::kExitUsage;
}

GroupResult Supervisor::ended_instead_of_restart(int signal) {
  GroupResult result{.exit_code = base::kExitSignalBase + signal, .signal = signal};
  last_ = result;  // the failure alone would not have ended the job
  output_.say(fmt::format("syncbn-launch: {}, instead of restart {} of {}", reason_of(result),
                          context_.restart_count + 1, options_.max_restarts));
  return result;
}

void Supervisor::renew_master_port() {
  // One that was asked for stays; the store on it is as new as the worker that holds it.
  if (options_.master_port.value_or(0) != 0) return;
  port_ = hold_port(0);
  context_.master_port = port_->port();
}

void Supervisor::announce_restart() {
  if (options_.voice == Voice::kOfItself) return;
  output_.say(fmt::format("syncbn-launch: restart {} of {}", context_.restart_count,
                          options_.max_restarts));
}

void Supervisor::announce_attempt(const Cluster::Start& start, int restarts_before) {
  events_.restart(start.reason);
  if (start.restarts > restarts_before) return announce_restart();
  output_.say(fmt::format("syncbn-launch: begins again on {} with {}: {}",
                          base::counted(start.nodes, "node"),
                          base::counted(start.ranks.world_size, "worker"), start.reason));
}

void Supervisor::report(const GroupResult& result) {
  last_ = result;
  if (result.signal) hurried_ = true;
  if (!result.start_error.empty()) {
    events_.failure(result.start_error, std::nullopt);
    output_.say(fmt::format("syncbn-launch: error: {}", result.start_error));
  } else if (result.failure) {
    events_.failure(reason_of(result), result.failure);
    output_.say(render_report(*result.failure));
    if (context_.restart_count > 0 && context_.restart_count == options_.max_restarts) {
      output_.say(fmt::format("syncbn-launch: no restart is left (--max_restarts={})",
                              options_.max_restarts));
    }
  } else if (result.signal && options_.voice != Voice::kOfItself) {
    output_.say(fmt::format("syncbn-launch: {}", reason_of(result)));
  }
}

std::string Supervisor::json_of(const GroupResult& result) const {
  const auto& failure = result.exit_code == base::kExitOk ? std::nullopt : last_.failure;
  return json_report(result.exit_code, context_.restart_count, failure);
}

}  // namespace syncbn::launch
