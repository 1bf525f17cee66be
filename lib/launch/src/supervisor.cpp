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
#include <span>
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
      events_(options, context_, logs_, output_) {
  if (options.nnodes.max > 1) record_requests_.emplace(StatusServer::kRecords);
}

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
    workers_.reset();  // before waiting for files
    const int exit_code = base::exit_code_of(error);
    events_.job_ended(exit_code, error.what());
    output_.finish_files();
    write_report(output_, options_.report, json_report(exit_code, context_.restart_count));
    throw;
  }
  const int ended = result.cause.exit_code;
  if (ended == base::kExitOk) {
    logs_.release_errors();
  } else if (last_.failure && !last_.failure->error_message.empty()) {
    copy_error_file(last_.failure->error_file, output_);
  }
  events_.job_ended(ended, reason_of(result));
  const bool has_stopped = ended == base::kExitOk || ended == base::kExitPreempted;
  if (!has_stopped && !resume_.empty())
    output_.announce("to resume from the last checkpoint: {}", resume_);
  output_.finish_files();
  logs_.clean_up();
  if (node_ != nullptr) {
    output_.say(node_->ended(ended, json_of(result)));
  } else {
    write_report(output_, options_.report, json_of(result));
  }
  const int exit_code = wait_for_reader(output_, signals_, ended, interrupted_);
  if (exit_code != ended) {  // output was lost, or a signal ended the wait
    write_report(output_, options_.report, json_report(exit_code, context_.restart_count));
  }
  return exit_code;
}

GroupResult Supervisor::run_attempts() {
  // Each node of a head has already printed why its workers ended.
  bool was_printed = options_.message_scope == MessageScope::kOwnWorkers;
  for (;;) {
    logs_.clean_up();
    while (!start_ && !quits_ && (link_->has_news() || !link_->finish())) handle_events();
    if (const auto& end = link_->finish()) return finish(*end, was_printed);
    if (quits_) {
      GroupResult result{.cause = ended_by_signal(context_.attempt, *signal_)};
      report(result);
      return result;
    }
    const GroupResult result = run_attempt(*std::exchange(start_, std::nullopt));
    if (options_.message_scope != MessageScope::kAlone) was_printed = true;
    // Also after a signal: other nodes may still run, and the leader may be in this process.
    link_->report_end(context_.attempt);
    report(result);
  }
}

GroupResult Supervisor::run_attempt(const Start& start) {
  const int restarts_before = context_.restart_count;
  const std::string own_id = context_.job_id;
  static_cast<Assignment&>(context_) = start;
  if (start.job_id.empty()) context_.job_id = own_id;
  if (!options_.nodes_may_change()) check_stdin(options_, context_.ranks.world_size);
  if (context_.attempt == 0 && link_->leads() && options_.nnodes.max > 1) {
    events_.nodes_joined();
  }
  if (context_.attempt > 0) announce_attempt(restarts_before);
  logs_.begin_attempt(context_.attempt);
  output_.begin_attempt(worker_outputs(options_, context_));
  output_.copy_filtered(Stream::kOut, logs_.file(logs_.attempt(), "filtered_stdout.log"));
  output_.copy_filtered(Stream::kErr, logs_.file(logs_.attempt(), "filtered_stderr.log"));
  events_.attempt_started();
  workers_.reset();
  const WorkerGroup::Run run{options_, command_, output_, logs_, events_, *link_};
  workers_ = std::make_unique<WorkerGroup>(run, context_);
  if (signal_) pass_on(Signal{*signal_});  // has come since the leader's Start
  while (workers_run()) handle_events();
  GroupResult result = workers_->finish();
  if (result.resume) resume_ = *result.resume;
  return result;
}

void Supervisor::handle_events() {
  std::vector<pollfd> polls{{link_->fd(), POLLIN, 0},
                            {signals_.fd(), POLLIN, 0},
                            {status_.fd(), POLLIN, 0},
                            {record_requests_ ? record_requests_->fd() : -1, POLLIN, 0}};
  output_.add_to(polls);
  const size_t of_workers = polls.size();
  auto wake = std::min(link_->due(), output_.due().value_or(Clock::time_point::max()));
  if (workers_run()) wake = std::min(wake, workers_->add_to(polls));
  if (link_->has_news()) wake = Clock::now();
  ::poll(polls.data(), polls.size(), base::milliseconds_until(wake));
  output_.flush();
  while (const auto signal = signals_.next()) handle_signal(*signal);
  if (workers_run()) workers_->forgive_own_silence();  // before it reads records
  handle_questions();
  // The link may look at every node, so it is not called for each line of a worker.
  if (polls[0].revents != 0 || Clock::now() >= link_->due()) link_->handle();
  handle_messages();
  if (workers_run()) workers_->handle(std::span(polls).subspan(of_workers));
}

void Supervisor::handle_signal(int signal) {
  if (signal == SIGWINCH) return;  // the next drawing reads the new width
  if (signal == SIGTSTP) return stop_and_continue();
  if (signals_.ends(signal)) {
    interrupted_ = true;
    const bool is_first = !signal_;
    if (is_first) {
      link_->report_signal(ended_by_signal(context_.attempt, signal));
      signal_ = signal;
    }
    // The leader stays until the other nodes have ended, or a second signal arrives.
    if (!workers_run()) quits_ = !is_first || !link_->leads();
  }
  pass_on(Signal{signal});
}

void Supervisor::stop_and_continue() {
  output_.clear_live();
  pass_on(Signal{SIGSTOP});
  link_->pause();
  Signals::stop_self();
  pass_on(Signal{SIGCONT});
}

void Supervisor::handle_questions() {
  if (status_.handle()) {
    // Without workers, the leader would wait for the answer of this node.
    workers_run() ? link_->send(AskStatus{}) : on(Status{});
  }
  if (record_requests_ && record_requests_->handle()) link_->send(AskAllRecords{});
}

void Supervisor::handle_messages() {
  while (!start_ && link_->has_news()) {
    std::visit([this](const auto& message) { on(message); }, *link_->next());
  }
  // After them: this node's own records may be the last that the leader waited for. And before the
  // next attempt begins.
  if (const auto records = link_->take_records()) write_records(*records);
  if (auto successor = link_->take_successor()) link_ = std::move(successor);
  if (link_->is_paused()) pass_on(Hold{});
}

void Supervisor::on(const Inquire& /*message*/) {
  link_->send(Workers{workers_run() ? workers_->states() : std::vector<WorkerState>()});
}

void Supervisor::on(const Status& message) {
  const char* state = options_.nnodes.max > 1 ? "waits for nodes" : "waits to restart";
  if (workers_run()) state = workers_->is_ending() ? "ends" : "runs";
  status_.answer(status_text(context_, state, message));
}

void Supervisor::on(const AskRecords& message) {
  if (workers_) workers_->send_records(message.question);
  link_->send(Records{message.question});
}

void Supervisor::on(const AllRecords& message) {
  FlightFile file = message;
  file.records = std::exchange(job_records_, {});
  record_requests_->answer(file.records.empty() ? "" : file.text());
}

bool Supervisor::is_own_signal(const JobFailure& end) const {
  return signal_ && end.rank < 0 && end.exit_code == base::kExitSignalBase + *signal_;
}

GroupResult Supervisor::finish(const JobFailure& end, bool was_printed) {
  if (end.exit_code == base::kExitOk) return {};
  const bool failed_here = last_.failure || !last_.start_error.empty();
  if (end.is(last_.cause) && (failed_here || is_own_signal(end))) return last_;
  if (is_own_signal(end) && failed_here && link_->leads()) {
    // The failure alone would not have ended the job.
    last_ = {.cause = ended_by_signal(end.attempt, *signal_)};
    output_.announce_for_job("{}, instead of restart {} of {}", reason_of(last_),
                             context_.restart_count + 1, options_.max_restarts);
    return last_;
  }
  const bool is_known = was_printed || end.is(last_.cause) || (is_own_signal(end) && failed_here);
  if (!is_known && !end.what.empty()) output_.announce("error: {}", end.what);
  // A node's reader is its head, which ends by itself and needs no time limit.
  if (!failed_here && node_ == nullptr) interrupted_ = true;
  // --report describes only the failure that determines the exit code.
  last_.failure.reset();
  return {.cause = end};
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
  if (!result.start_error.empty()) {
    events_.failure(result.start_error, std::nullopt);
    output_.announce("error: {}", result.start_error);
  } else if (result.failure) {
    events_.failure(reason_of(result), result.failure);
    output_.say(render_report(*result.failure));
    if (result.cause.exit_code == base::kExitUsage) hint_at_place();
  } else if (is_own_signal(result.cause)) {
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
  const int code = result.cause.exit_code;
  const auto& failure = code == base::kExitOk ? std::nullopt : last_.failure;
  return json_report(code, context_.restart_count, failure);
}

}  // namespace syncbn::launch
