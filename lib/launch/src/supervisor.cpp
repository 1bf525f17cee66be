#include "supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/signal_name.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "common/processes.h"
#include "common/words.h"
#include "options/option_table.h"
#include "output/failure_report.h"

namespace syncbn::launch {
namespace {

OutputOptions output_options(const LaunchOptions& options) {
  const Streams colours = options.colours.value_or(terminal_colours());
  return {.out = {::isatty(STDOUT_FILENO) == 1, colours.out, options.duplicate_stdout_filters},
          .err = {::isatty(STDERR_FILENO) == 1, colours.err, options.duplicate_stderr_filters},
          .speaks_for_job = options.message_scope != MessageScope::kOwnWorkers};
}

std::vector<WorkerOutput> worker_outputs(const LaunchOptions& options, const RunContext& context) {
  std::vector<WorkerOutput> workers;
  const auto& shown = options.local_ranks_filter;
  for (int local = 0; local < options.nproc_per_node; ++local) {
    WorkerOutput& worker = workers.emplace_back();
    worker.rank = context.ranks.base + local;
    // The output of a job's only worker passes unchanged.
    if (context.ranks.world_size > 1) worker.prefix = line_prefix(options, worker.rank, local);
    worker.whole_lines = options.nproc_per_node > 1 || !worker.prefix.empty();
    worker.shown = shown.empty() || std::find(shown.begin(), shown.end(), local) != shown.end();
  }
  return workers;
}

// torchrun does the same, for an agent that itself runs under @record.
void copy_error_file(const std::string& file, Output& output) {
  const auto target = base::env("TORCHELASTIC_ERROR_FILE");
  if (!target) return;
  output.write_file(*target, [file, to = *target] {
    std::error_code ignored;
    std::filesystem::copy_file(file, to, std::filesystem::copy_options::overwrite_existing,
                               ignored);
  });
}

// Empty after success.
std::string reason_of(const GroupResult& result) {
  if (!result.start_error.empty()) return result.start_error;
  if (result.failure) return summary_of(*result.failure) + brief(result.failure->error_message);
  if (result.signal) return "ended by " + base::signal_name(*result.signal);
  return result.cause.what;
}

}  // namespace

Supervisor::Supervisor(const LaunchOptions& options, const RunContext& context,
                       const Command& command, std::unique_ptr<NodeLink> link, SshNode* node)
    : options_(options),
      context_(context),
      command_(command),
      link_(std::move(link)),
      node_(node),
      signals_(options.ending_signals, node != nullptr ? &node->head() : nullptr),
      logs_(options),
      output_(output_options(options)),
      events_(options, context_, logs_, output_) {}

int Supervisor::run() {
  if (logs_.is_wanted()) {
    const std::string host = node_ != nullptr ? " on " + options_.local_addr : "";
    output_.announce("log files{} are in {}", host, logs_.path().string());
  }
  events_.job_started();
  GroupResult result;
  try {
    result = run_attempts();
  } catch (const std::exception& error) {
    const int exit_code = base::exit_code_of(error);
    events_.job_ended(exit_code, error.what());
    output_.finish_files();
    write_report(output_, options_.report, json_report(exit_code, context_.restart_count));
    throw;
  }
  if (result.exit_code == base::kExitOk) {
    logs_.release_errors();
  } else if (last_.failure && !last_.failure->error_message.empty()) {
    copy_error_file(last_.failure->error_file, output_);
  }
  events_.job_ended(result.exit_code, reason_of(result));
  const bool has_stopped =
      result.exit_code == base::kExitOk || result.exit_code == base::kExitPreempted;
  if (!has_stopped && !resume_.empty())
    output_.announce("to resume from the last checkpoint: {}", resume_);
  output_.finish_files();
  logs_.clean_up();
  if (node_ != nullptr) {
    output_.say(node_->ended(result.exit_code, json_of(result)));
  } else {
    write_report(output_, options_.report, json_of(result));
  }
  const int exit_code = wait_for_reader(output_, signals_, result.exit_code, interrupted_);
  if (exit_code != result.exit_code) {  // output was lost, or a signal ended the wait
    write_report(output_, options_.report, json_report(exit_code, context_.restart_count));
  }
  return exit_code;
}

GroupResult Supervisor::run_attempts() {
  // Each node of a head has already printed why its workers ended.
  bool was_printed = options_.message_scope == MessageScope::kOwnWorkers;
  for (;;) {
    logs_.clean_up();
    std::optional<Start> start;
    if (const auto signal = wait_for_leader(start)) {
      GroupResult result{.exit_code = base::kExitSignalBase + *signal, .signal = signal};
      report(result);
      return result;
    }
    if (const auto& end = link_->finish()) return finish(*end, was_printed);
    const int restarts_before = context_.restart_count;
    apply(*start);
    if (context_.attempt == 0 && link_->leads() && options_.nnodes.max > 1) {
      events_.nodes_joined();
    }
    if (context_.attempt > 0) announce_attempt(restarts_before);
    GroupResult result = run_attempt();
    if (options_.message_scope != MessageScope::kAlone) was_printed = true;
    // Also after a signal: other nodes may still run, and the leader may be in this process.
    link_->report_end(context_.attempt);
    report(result);
  }
}

GroupResult Supervisor::finish(const JobFailure& end, bool was_printed) {
  if (end.exit_code == base::kExitOk) return {};
  const bool failed_here = last_.failure || !last_.start_error.empty();
  const bool is_own_signal =
      signal_ && end.rank < 0 && end.exit_code == base::kExitSignalBase + *signal_;
  if (end.is(last_.cause) && (failed_here || is_own_signal)) return last_;
  if (is_own_signal && failed_here && link_->leads()) {
    // The failure alone would not have ended the job.
    last_ = {.exit_code = end.exit_code, .signal = signal_};
    output_.announce_for_job("{}, instead of restart {} of {}", reason_of(last_),
                             context_.restart_count + 1, options_.max_restarts);
    return last_;
  }
  if (!was_printed && !end.what.empty() && !end.is(last_.cause))
    output_.announce("error: {}", end.what);
  // A node's reader is its head, which ends by itself and needs no time limit.
  if (!failed_here && node_ == nullptr) interrupted_ = true;
  // --report describes only the failure that determines the exit code.
  last_.failure.reset();
  return {.exit_code = end.exit_code, .cause = end};
}

GroupResult Supervisor::run_attempt() {
  logs_.begin_attempt(context_.attempt);
  output_.begin_attempt(worker_outputs(options_, context_));
  output_.copy_filtered(Stream::kOut, logs_.file(logs_.attempt(), "filtered_stdout.log"));
  output_.copy_filtered(Stream::kErr, logs_.file(logs_.attempt(), "filtered_stderr.log"));
  events_.attempt_started();
  const WorkerGroup::Run run{options_, command_, signals_, output_,
                             logs_,    events_,  status_,  *link_};
  records_.clear();
  WorkerGroup workers(run, context_);
  GroupResult result = workers.run();
  records_ = workers.take_records();
  if (result.resume) resume_ = *result.resume;
  return result;
}

void Supervisor::write_records(const FlightFile& records) {
  if (records.records.empty()) return;
  logs_.begin_attempt(records.attempt);  // the folder, which may have been removed
  const std::string file = save_flight_file(records, logs_, output_);
  const bool was_named = last_.failure && last_.failure->flight_file == file;
  if (file.empty() || was_named) return;
  const std::string host = node_ != nullptr ? " on " + options_.local_addr : "";
  std::string missing;
  for (const auto& one : records.missing) missing += fmt::format("; {}: {}", one.node, one.why);
  output_.announce_for_job("the latest calls of all ranks{}: {}{}", host,
                           shell_quoted({"syncbn-launch", "explain", file}), missing);
}

std::optional<int> Supervisor::wait_for_leader(std::optional<Start>& start) {
  bool signalled = false;
  for (;;) {
    link_->handle();
    if (const auto records = link_->take_records()) write_records(*records);
    while (const auto message = link_->next()) {
      if (const auto* const line = std::get_if<Waiting>(&*message))
        output_.announce_for_job("{}", line->message);
      if (std::holds_alternative<Inquire>(*message)) link_->send(Workers{});
      if (const auto* const answer = std::get_if<Status>(&*message))
        status_.answer(status_text(context_, link_->waits(), *answer));
      if (const auto* const ask = std::get_if<AskRecords>(&*message)) {
        for (const RankMemory& rank : records_) link_->report_record(ask->question, rank);
        link_->send(Records{ask->question});
      }
      if (const auto* const begin = std::get_if<Start>(&*message); begin && !link_->finish()) {
        start = *begin;
        return std::nullopt;
      }
    }
    if (auto successor = link_->take_successor()) {
      link_ = std::move(successor);
      continue;
    }
    if (link_->finish()) return std::nullopt;
    if (status_.handle()) status_.answer(status_text(context_, link_->waits()));
    std::vector<pollfd> polls{
        {signals_.fd(), POLLIN, 0}, {link_->fd(), POLLIN, 0}, {status_.fd(), POLLIN, 0}};
    output_.add_to(polls);
    ::poll(polls.data(), polls.size(), base::milliseconds_until(link_->due()));
    output_.flush();
    while (const auto signal = signals_.next()) {
      if (*signal == SIGTSTP) {
        link_->pause();
        Signals::stop_self();
      }
      if (!signals_.ends(*signal)) continue;
      interrupted_ = true;
      signal_ = signal;
      link_->report_signal(*signal);
      // The leader stays until the other nodes have ended, or a second signal arrives.
      if (std::exchange(signalled, true) || !link_->leads()) return signal;
    }
  }
}

void Supervisor::apply(const Assignment& start) {
  std::string own_id = std::move(context_.job_id);
  static_cast<Assignment&>(context_) = start;
  if (start.job_id.empty()) context_.job_id = std::move(own_id);
  if (!options_.nodes_may_change()) check_stdin(options_, context_.ranks.world_size);
}

void Supervisor::announce_attempt(int restarts_before) {
  events_.restart(context_.reason);
  if (context_.restart_count == restarts_before) {
    output_.announce("starting again on {} with {}: {}", base::counted(context_.nodes, "node"),
                     base::counted(context_.ranks.world_size, "worker"), context_.reason);
  } else if (options_.restart_window.count() == 0) {
    output_.announce_for_job("restart {} of {}", context_.restart_count, options_.max_restarts);
  } else {
    output_.announce_for_job("restart {} (at most {} within {})", context_.restart_count,
                             options_.max_restarts, base::format_seconds(options_.restart_window));
  }
}

void Supervisor::report(const GroupResult& result) {
  last_ = result;
  if (result.signal) {
    interrupted_ = true;
    signal_ = result.signal;
  }
  if (!result.start_error.empty()) {
    events_.failure(result.start_error, std::nullopt);
    output_.announce("error: {}", result.start_error);
  } else if (result.failure) {
    events_.failure(reason_of(result), result.failure);
    output_.say(render_report(*result.failure));
    if (result.exit_code == base::kExitUsage) hint_at_place();
  } else if (result.signal) {
    output_.announce_for_job("{}", reason_of(result));
  }
}

void Supervisor::hint_at_place() {
  for (std::string word : options_.program) {
    word.resize(std::min(word.find('='), word.size()));
    std::string name = word;
    std::ranges::replace(name, '-', '_');
    const bool is_ours = std::ranges::any_of(option_fields(), [&](const config::FieldInfo& field) {
      return name == "__" + field.path && (field.tags & kAboutRun) != 0;
    });
    if (!is_ours) continue;
    return output_.announce("{} went to {}: the launcher's options come before the program", word,
                            options_.program.front());
  }
}

std::string Supervisor::json_of(const GroupResult& result) const {
  const auto& failure = result.exit_code == base::kExitOk ? std::nullopt : last_.failure;
  return json_report(result.exit_code, context_.restart_count, failure);
}

}  // namespace syncbn::launch
