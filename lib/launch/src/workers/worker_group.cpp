#include "workers/worker_group.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/agent.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/flight_record.h>
#include <syncbn/base/handshake.h>
#include <syncbn/base/job_secret.h>
#include <syncbn/base/sha256.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/descriptors.h"
#include "common/processes.h"

namespace syncbn::launch {
namespace {

// Upper bound on the time for a debugger to print the threads of a worker.
constexpr std::chrono::seconds kStackPatience{5};

// A background job must not read from the terminal. The kernel enforces that only within the
// terminal's session, and workers are in the keeper's.
bool may_read_input() {
  return ::isatty(STDIN_FILENO) == 0 || ::tcgetpgrp(STDIN_FILENO) == ::getpgrp();
}

}  // namespace

WorkerGroup::WorkerGroup(const Run& run, const RunContext& context)
    : run_(run),
      context_(context),
      agent_(run_.options, context_.attempt, context_.ranks.base),
      watch_(run_.options, run_.output, run_.link, context_.attempt, workers_, started_) {
  start();
}

GroupResult WorkerGroup::finish() {
  const bool keeper_is_lost = keeper_->gone();
  if (keeper_is_lost) {
    keeper_->clean_up_after_loss(NodeAgent::kKillPatience);
  } else {
    keeper_->finish(NodeAgent::kKillPatience, agent_.cause() ? Daemons::kKill : Daemons::kSpare);
  }
  for (size_t i = 0; i < workers_.size(); ++i) workers_[i].pipes.drain(sink(i));
  if (keeper_is_lost) {
    run_.output.clear_live();
    agent_.lose_keeper(keeper_->pid(), Clock::now());
    carry_out_commands();
  }
  for (size_t i = 0; i < workers_.size(); ++i) {
    run_.output.finish(i, Stream::kOut);
    run_.output.finish(i, Stream::kErr);
    workers_[i].pipes = {};  // a daemon that still writes to them fails, and does not block
  }
  run_.output.clear_live();
  GroupResult ended = result();
  for (const Worker& worker : workers_) {
    const int code = exit_code_of(worker.process.wait_status.value_or(SIGKILL));
    // A worker that exits with one of these codes has printed the command itself.
    const bool has_stopped = code == base::kExitOk || code == base::kExitPreempted ||
                             code == base::kExitSignalBase + SIGINT;
    const std::string& resume = worker.progress.notes().resume;
    if (!resume.empty()) ended.resume = has_stopped ? "" : resume;
  }
  return ended;
}

void WorkerGroup::send_records(int question) const {
  for (const Worker& worker : workers_) run_.link.report_record(question, worker.calls);
}

void WorkerGroup::start() {
  become_subreaper();  // for the orphans of a keeper that is killed
  std::vector<WorkerSpec> specs;
  std::vector<base::UniqueFd> workers_ends;
  const base::UniqueFd secret = share_secret_of_workers();
  for (WorkerProcess& process : agent_.workers()) {
    const size_t i = workers_.size();
    Worker& worker = workers_.emplace_back(Worker{process});
    base::UniqueFd out = open_stream(i, Stream::kOut, worker.pipes.out);
    base::UniqueFd err = open_stream(i, Stream::kErr, worker.pipes.err);
    Pipe agent = Pipe::make();
    set_nonblocking(agent.reader);
    set_nonblocking(agent.writer);
    const int local_rank = static_cast<int>(i);
    worker.argv = worker_argv(run_.command, local_rank);

    Variables variables = worker_variables(run_.options, context_, local_rank);
    variables["TORCHELASTIC_ERROR_FILE"] = run_.logs.error_file(local_rank);
    variables["SYNCBN_AGENT_FD"] = std::to_string(agent.writer.get());
    worker.calls = RankMemory::make();
    std::vector<int> inherited{agent.writer.get()};
    if (worker.calls.fd() >= 0) {
      inherited.push_back(worker.calls.fd());
      variables[base::FlightRecord::kDescriptor] = std::to_string(worker.calls.fd());
    }
    if (secret) {
      inherited.push_back(secret.get());
      variables[base::kSecretDescriptor] = std::to_string(secret.get());
    }
    variables["SYNCBN_AGENT_VERSION"] = std::to_string(SYNCBN_AGENT_VERSION);
    // Not that of a launcher around this one.
    variables["SYNCBN_AGENT_BAR"] = ::isatty(STDERR_FILENO) == 1 ? "1" : "";

    specs.push_back({.file = run_.command.file,
                     .argv = worker.argv,
                     .env = base::environment_with(variables),
                     // Only one worker: several readers would each get random parts of the input.
                     .stdin_fd = process.rank == run_.options.stdin_rank && may_read_input()
                                     ? STDIN_FILENO
                                     : -1,
                     .stdout_fd = out.get(),
                     .stderr_fd = err.get(),
                     .inherited = std::move(inherited)});
    worker.argv.front() = run_.command.file;  // reports show which of several python3 it was
    if (!context_.cpus.empty()) specs.back().cpu_mask = cpu_mask(context_.cpus[i]);
    worker.agent = std::move(agent.reader);
    for (base::UniqueFd* fd : {&out, &err, &agent.writer}) workers_ends.push_back(std::move(*fd));
  }
  keeper_ = std::make_unique<Keeper>(specs, [this] { run_.logs.remove(); });
}

/// All nodes derive the same secret from the job's token. Without a token, several nodes share
/// none.
base::UniqueFd WorkerGroup::share_secret_of_workers() const {
  const std::string& token = run_.options.token;
  if (!token.empty()) {
    return base::share_secret(base::to_hex(base::hmac_sha256(
        token, fmt::format("syncbn-workers {} {}", context_.job_id, context_.attempt))));
  }
  return context_.nodes == 1 ? base::share_secret(base::make_secret()) : base::UniqueFd();
}

base::UniqueFd WorkerGroup::open_stream(size_t index, Stream stream, base::UniqueFd& reader) {
  const int local_rank = static_cast<int>(index);
  const bool is_out = stream == Stream::kOut;
  const Streams tee = run_.options.tee.of(local_rank);
  const Streams redirect = run_.options.redirects.of(local_rank);
  const bool tees = is_out ? tee.out : tee.err;
  const auto path =
      run_.logs.file(run_.logs.of_worker(local_rank), is_out ? "stdout.log" : "stderr.log");
  if (tees) run_.output.log_to(index, stream, path);
  if (!tees && (is_out ? redirect.out : redirect.err)) return open_to_append(path, "the log file");
  Pipe pipe = Pipe::make();
  set_nonblocking(pipe.reader);
  reader = std::move(pipe.reader);
  return std::move(pipe.writer);
}

Clock::time_point WorkerGroup::add_to(std::vector<pollfd>& polls) const {
  polls.push_back({keeper_->fd(), POLLIN, 0});
  for (const Worker& worker : workers_) worker.pipes.add_to(polls, run_.output);
  watch_.add_to(polls);
  return std::min(watch_.due(), agent_.due());
}

void WorkerGroup::handle(std::span<const pollfd> polls) {
  // Each worker that starts wakes this process: do not read three pipes per worker each time.
  const bool has_output = Clock::now() >= watch_.due() ||
                          std::any_of(polls.begin() + 1, polls.end(),
                                      [](const pollfd& one) { return one.revents != 0; });
  // Before the events: a worker's output, then its end.
  for (size_t i = 0; has_output && i < workers_.size(); ++i) {
    workers_[i].pipes.read(run_.output, sink(i));
  }
  if (has_output) watch_.read_all();
  run_.output.show_partial_lines();
  while (const auto event = keeper_->next_event()) handle_event(*event);
  agent_.tick(Clock::now());
  carry_out_commands();
  check_progress();
}

void WorkerGroup::handle_event(const KeeperEvent& event) {
  const auto index = static_cast<size_t>(event.worker);
  Worker& worker = workers_[index];
  if (event.kind == KeeperEvent::Kind::kStarted) {
    run_.events.worker_started(worker.process.rank, event.worker, event.pid);
  } else if (event.kind == KeeperEvent::Kind::kExited) {
    worker.pipes.drain(sink(index));  // its last lines belong before messages about its end
    watch_.read(worker);              // the step at which it failed
    worker.process.out_of_memory = oom_.killed(event.value);
    // A file server may hold up this read.
    const bool may_fail_first = event.value != 0 && !agent_.failed() && !agent_.is_ending();
    if (may_fail_first) worker.process.error = brief(run_.logs.error_message(event.worker));
  }
  on(event);
}

void WorkerGroup::carry_out_commands() {
  for (const AgentCommand& command : agent_.take_commands()) carry_out(command);
}

void WorkerGroup::carry_out(const AgentCommand& command) {
  using enum AgentCommand::Kind;
  const auto& [kind, number, text] = command;
  const auto index = static_cast<size_t>(number);
  switch (kind) {
    case kSignal:
      // Workers that were paused have not hung.
      if (number == SIGSTOP || number == SIGCONT) watch_.forgive_silence();
      return keeper_->signal_workers(number);
    case kShowThreads:
      return show_threads(agent_.workers()[index]);
    case kKill:
      ::kill(-agent_.workers()[index].pid, SIGKILL);
      return;
    case kNote:
      return note_in_logs(text, number);
    case kFail:
      failure_.local_rank = static_cast<int>(agent_.failed().value_or(0));
      failure_.time = std::chrono::system_clock::now();
      failure_.seconds_after_start = seconds_since_start();
      return run_.link.send(Failed{*agent_.cause()});
    case kLogEnd:
      return log_end(index, text);
    case kSay:
      return run_.output.announce("{}", text);
    case kNameHang:
      watch_.hang_was_named(number != 0);
      return run_.output.announce_for_job("{}", text);
    case kSayHelpers:
      return run_.output.announce("{}: {}", text, describe_helpers(keeper_->pid()));
    case kGiveUp:
      throw base::UnavailableError(agent_.cause()->what);
  }
}

void WorkerGroup::note_in_logs(const std::string& reason, int except) {
  for (size_t i = 0; i < workers_.size(); ++i) {
    watch_.read(workers_[i]);
    const std::string& log = workers_[i].progress.notes().log;
    const bool has_noted = static_cast<int>(i) == except;
    if (!log.empty() && !has_noted) note_end(log, reason, run_.output);
  }
  constexpr std::chrono::seconds kPatience{1};
  run_.output.files().wait(kPatience);
}

void WorkerGroup::log_end(size_t index, const std::string& error) {
  const WorkerProcess& worker = agent_.workers()[index];
  run_.events.worker_ended({.rank = worker.rank,
                            .local_rank = static_cast<int>(index),
                            .pid = worker.pid,
                            .wait_status = worker.wait_status,
                            .seconds = seconds_since_start(),
                            .by_launcher = worker.ended_by_us,
                            .error = error});
}

OutputPipes::Sink WorkerGroup::sink(size_t index) {
  return [this, index](Stream stream, std::string_view bytes) {
    run_.output.write(index, stream, bytes);
  };
}

void WorkerGroup::check_progress() {
  if (!watch_.is_due()) return;
  keeper_->reap_orphans();
  const pid_t keeper = keeper_->pid();
  if (state_of_process(keeper) == 'T') {  // it does not report the ends of workers
    run_.output.announce("the keeper process (pid {}) was stopped; continuing it", keeper);
    ::kill(keeper, SIGCONT);
  }
  // A worker may wait for our reader, which is no hang.
  if (run_.output.reader_waits()) watch_.forgive_silence();
  for (const std::string& line : watch_.check(agent_.expects_progress(), Clock::now())) {
    run_.output.announce("{}", line);
  }
}

void WorkerGroup::show_threads(const WorkerProcess& worker) {
  // This launcher sends no heartbeats meanwhile.
  const std::chrono::milliseconds patience =
      std::min<std::chrono::milliseconds>(kStackPatience, run_.options.alive_period);
  if (state_of_process(worker.pid) == 'T') return;
  run_.output.announce("threads of rank {}:\n{}", worker.rank,
                       describe_threads(worker.pid, Clock::now() + patience * 4 / 5));
  abort_if_caught(worker.pid, Clock::now() + patience / 5);
}

GroupResult WorkerGroup::result() {
  const auto write = [this](const std::string& why) {
    return write_flight_file(why, context_, workers_, run_.logs, run_.output);
  };
  GroupResult result{.cause = agent_.cause().value_or(JobFailure{})};
  if (!agent_.failed()) {
    // Unless the user asked for log files, nobody would look for this one.
    if (agent_.cause() && run_.logs.is_wanted()) write(result.cause.what);
    return result;
  }
  const WorkerProcess& worker = agent_.workers()[*agent_.failed()];
  if (worker.start_error) {
    result.start_error = describe_start_error(worker, run_.command.file);
    return result;
  }
  complete(failure_, workers_, run_.logs, run_.output);
  if (restart_may_help(*worker.wait_status)) {  // else it has said what was wrong
    const std::string what = result.cause.describe() + " on " + base::hostname();
    failure_.flight_file = write(worker.hang.empty() ? what : worker.hang);
  }
  result.failure = std::move(failure_);
  return result;
}

}  // namespace syncbn::launch
