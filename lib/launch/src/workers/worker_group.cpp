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
#include <syncbn/base/signal_name.h>
#include <syncbn/base/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/descriptors.h"
#include "common/processes.h"

namespace syncbn::launch {
namespace {

// Upper bound on the wait after SIGKILL: a process may be uninterruptible in the kernel.
constexpr std::chrono::seconds kKillPatience{5};

// Grace period for helpers after a failure or a signal, and for daemons after success, because a
// container kills them once the launcher ends. torch_shm_manager unlinks shared memory 2 s after
// its last client.
constexpr std::chrono::milliseconds kHelperPatience{3000};

// Grace period for rank 0 to print a usage error that another worker found first: every worker
// finds it, but often only rank 0 prints it. With more time, rank 0 would report the other worker
// as lost.
constexpr std::chrono::seconds kUsageErrorPatience{1};

// Upper bound on the grace period after a worker was killed for lack of memory: until memory is
// free, the others cannot act on a signal.
constexpr std::chrono::seconds kOutOfMemoryPatience{3};

// Upper bound on the time for a debugger to print the threads of a worker.
constexpr std::chrono::seconds kStackPatience{5};

// A wait that is shorter than this is not announced.
constexpr std::chrono::seconds kAnnounceAfter{1};

// A background job must not read from the terminal. The kernel enforces that only within the
// terminal's session, and workers are in the keeper's.
bool may_read_input() {
  return ::isatty(STDIN_FILENO) == 0 || ::tcgetpgrp(STDIN_FILENO) == ::getpgrp();
}

}  // namespace

WorkerGroup::WorkerGroup(const Run& run, const RunContext& context)
    : run_(run),
      context_(context),
      workers_(static_cast<size_t>(run_.options.nproc_per_node)),
      watch_(run_.options, run_.output, run_.link, context_.attempt, workers_),
      started_(Clock::now()) {}

GroupResult WorkerGroup::run() {
  start();
  while (!is_over() && !keeper_->gone()) {
    wait_for_events();
    handle_signals();
    watch_.forgive_own_silence();  // before reading the records that arrived meanwhile
    if (run_.status.handle()) run_.link.send(AskStatus{});
    handle_link();
    read_outputs();  // before the events: a worker's output, then its end
    while (const auto event = keeper_->next_event()) handle_event(*event);
    handle_deadlines();
    check_progress();
  }
  const bool keeper_is_lost = keeper_->gone();
  if (keeper_is_lost) {
    keeper_->clean_up_after_loss(kKillPatience);
  } else {
    const bool spares = succeeded() || (only_helpers_were_ended_ && !ended_by_signal_);
    keeper_->finish(kKillPatience, spares ? Daemons::kSpare : Daemons::kKill);
  }
  for (size_t i = 0; i < workers_.size(); ++i) workers_[i].pipes.drain(sink(i));
  if (keeper_is_lost && running() > 0) handle_lost_keeper();
  for (size_t i = 0; i < workers_.size(); ++i) {
    run_.output.finish(i, Stream::kOut);
    run_.output.finish(i, Stream::kErr);
  }
  run_.output.clear_live();
  GroupResult ended = result();
  for (const Worker& worker : workers_) {
    const int code = exit_code_of(worker.wait_status.value_or(SIGKILL));
    // A worker that exits with one of these codes has printed the command itself.
    const bool has_stopped = code == base::kExitOk || code == base::kExitPreempted ||
                             code == base::kExitSignalBase + SIGINT;
    const std::string& resume = worker.progress.notes().resume;
    if (!resume.empty()) ended.resume = has_stopped ? "" : resume;
  }
  return ended;
}

/// After the keeper was killed. Throws unless a failure or a signal had already ended the attempt,
/// whose result then stays.
void WorkerGroup::handle_lost_keeper() {
  run_.output.clear_live();
  const std::string what = fmt::format(
      "the keeper process (pid {}) was killed; all workers have been killed", keeper_->pid());
  if (!ending_ && !first_failure_) {
    // A job that can go on without this node treats it as lost.
    if (!run_.options.nodes_may_change()) {
      run_.link.send(Failed{job_failure(context_.attempt, base::kExitUnavailable, what)});
    }
    throw base::UnavailableError(what);
  }
  run_.output.announce("{}", what);
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (!std::exchange(workers_[i].running, false)) continue;
    workers_[i].ended_by_us = true;
    log_end(i, "killed with the keeper process");
  }
}

std::vector<RankMemory> WorkerGroup::take_records() {
  std::vector<RankMemory> records;
  for (Worker& worker : workers_) records.push_back(std::move(worker.calls));
  return records;
}

void WorkerGroup::start() {
  become_subreaper();  // for the orphans of a keeper that is killed
  std::vector<WorkerSpec> specs;
  std::vector<base::UniqueFd> workers_ends;
  const base::UniqueFd secret = share_secret_of_workers();
  for (size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    base::UniqueFd out = open_stream(i, Stream::kOut, worker.pipes.out);
    base::UniqueFd err = open_stream(i, Stream::kErr, worker.pipes.err);
    Pipe agent = Pipe::make();
    set_nonblocking(agent.reader);
    set_nonblocking(agent.writer);
    const int local_rank = static_cast<int>(i);
    worker.rank = context_.ranks.base + local_rank;
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

    specs.push_back(
        {.file = run_.command.file,
         .argv = worker.argv,
         .env = base::environment_with(variables),
         // Only one worker: several readers would each get random parts of the input.
         .stdin_fd = worker.rank == run_.options.stdin_rank && may_read_input() ? STDIN_FILENO : -1,
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

void WorkerGroup::wait_for_events() {
  std::vector<pollfd> polls{{run_.signals.fd(), POLLIN, 0}, {keeper_->fd(), POLLIN, 0}};
  run_.output.add_to(polls);
  const auto outputs = static_cast<std::ptrdiff_t>(polls.size());
  for (const Worker& worker : workers_) worker.pipes.add_to(polls, run_.output);
  watch_.add_to(polls);
  const auto outputs_end = static_cast<std::ptrdiff_t>(polls.size());
  polls.push_back({run_.status.fd(), POLLIN, 0});
  polls.push_back({run_.link.fd(), POLLIN, 0});
  auto wake = std::min(watch_.due(), run_.link.due());
  for (const auto& time : {end_at_, announce_at_, deadline_, run_.output.due()}) {
    if (time) wake = std::min(wake, *time);
  }
  ::poll(polls.data(), polls.size(), base::milliseconds_until(wake));
  // Each worker that starts wakes this process: do not read three pipes per worker each time.
  outputs_are_due_ = Clock::now() >= watch_.due() ||
                     std::any_of(polls.begin() + outputs, polls.begin() + outputs_end,
                                 [](const pollfd& one) { return one.revents != 0; });
  // The link may look at every node, so it is not called for each line of a worker.
  link_is_due_ = polls.back().revents != 0 || Clock::now() >= run_.link.due();
}

void WorkerGroup::handle_signals() {
  while (const auto signal = run_.signals.next()) {
    switch (*signal) {
      case SIGUSR1:
      case SIGUSR2:
        keeper_->signal_workers(*signal);
        break;
      case SIGSTOP:  // Ctrl-Z at the head, which is no hang; this process goes on
      case SIGCONT:
        is_paused_ = *signal == SIGSTOP;
        watch_.forgive_silence();
        keeper_->signal_workers(*signal);
        break;
      case SIGTSTP:
        stop_and_continue();
        break;
      case SIGWINCH:
        break;  // the next drawing reads the new width
      default:
        end_by_signal(*signal);
    }
  }
}

void WorkerGroup::end_by_signal(int signal) {
  if (ended_by_signal_) return kill_workers();  // the second time
  ended_by_signal_ = signal;
  run_.link.report_signal(signal);
  if (!first_failure_) cause_ = job_failure(context_.attempt, base::kExitSignalBase + signal, "");
  // If the workers are ending already, their grace period goes on.
  if (!ending_) end_workers(signal);
}

void WorkerGroup::handle_link() {
  if (link_is_due_) run_.link.handle();
  while (const auto message = run_.link.next()) {
    std::visit([this](const auto& one) { on(one); }, *message);
  }
  if (run_.link.is_paused()) watch_.forgive_silence();
}

void WorkerGroup::on(const AskRecords& message) {
  for (const Worker& worker : workers_) run_.link.report_record(message.question, worker.calls);
  run_.link.send(Records{message.question});
}

void WorkerGroup::on(const Status& message) {
  run_.status.answer(status_text(context_, ending_ ? "ends" : "runs", message));
}

void WorkerGroup::on(const Stop& message) {
  const bool is_of_another = message.why.attempt >= 0 && message.why.attempt != context_.attempt;
  if (is_of_another || stop_) return;
  stop_ = message;
  if (ending_ || first_failure_) return;
  const auto scope = run_.options.message_scope;
  if (scope != MessageScope::kOwnWorkers) {
    run_.output.announce("{}; ending the workers of {}", message.why.what,
                         scope == MessageScope::kWholeJob ? "all nodes" : "this node");
    cause_ = message.why;
  }
  if (message.failed) note_in_logs("an error: " + message.why.what, nullptr);
  end_workers(SIGTERM);
}

void WorkerGroup::stop_and_continue() {
  run_.output.clear_live();
  keeper_->signal_workers(SIGSTOP);
  run_.link.pause();
  Signals::stop_self();
  keeper_->signal_workers(SIGCONT);
}

void WorkerGroup::handle_event(const KeeperEvent& event) {
  const auto index = static_cast<size_t>(event.worker);
  Worker& worker = workers_[index];
  switch (event.kind) {
    case KeeperEvent::Kind::kStarted:
      worker.pid = event.pid;
      run_.events.worker_started(worker.rank, static_cast<int>(index), worker.pid);
      break;
    case KeeperEvent::Kind::kForkFailed:
      worker.start_error = event.value;
      worker_ended(index);
      break;
    case KeeperEvent::Kind::kNotStarted:
      worker.running = false;
      break;
    case KeeperEvent::Kind::kKeeper:
      break;
    case KeeperEvent::Kind::kBindFailed:
    case KeeperEvent::Kind::kExecFailed:
      worker.bind_failed = event.kind == KeeperEvent::Kind::kBindFailed;
      worker.start_error = event.value;
      break;
    case KeeperEvent::Kind::kLeft:
      if (std::exchange(left_, static_cast<Left>(event.value)) == Left::kWorkers) end_helpers();
      if (left_ == Left::kDaemons && succeeded()) deadline_ = Clock::now() + kHelperPatience;
      break;
    case KeeperEvent::Kind::kExited:
      worker.pipes.drain(sink(index));  // its last lines belong before messages about its end
      watch_.read(worker);              // the step at which it failed
      if (worker.hang.empty()) worker.wait_status = event.value;
      worker_ended(index);
      break;
  }
}

void WorkerGroup::worker_ended(size_t index) {
  Worker& worker = workers_[index];
  worker.running = false;
  worker.ended_by_us = ending_;
  log_end(index, worker.start_error ? std::strerror(*worker.start_error) : "");
  const bool failed = worker.start_error || worker.wait_status.value_or(0) != 0;
  if (!failed || ending_ || first_failure_) return;
  const int code = worker.wait_status ? exit_code_of(*worker.wait_status) : base::kExitUnavailable;
  const auto status = worker.start_error ? std::nullopt : worker.wait_status;
  const std::string what = ExitStatus{status, status && oom_.killed(*status)}.in_words() +
                           brief(run_.logs.error_message(static_cast<int>(index)));
  fail_first(index, code, status && restart_may_help(*status), what);
}

void WorkerGroup::fail_first(size_t index, int exit_code, bool may_restart,
                             const std::string& what) {
  first_failure_ = {index, std::chrono::system_clock::now(), seconds_since_start()};
  end_at_ = Clock::now();
  if (exit_code == base::kExitUsage && index != 0) *end_at_ += kUsageErrorPatience;
  const std::string failure = fmt::format("rank {} failed: {}", workers_[index].rank, what);
  // Before the other workers notice and log what they see. A worker that has exited has logged its
  // failure itself.
  const bool was_killed = exit_code > base::kExitSignalBase;
  if (exit_code != base::kExitPreempted) {
    note_in_logs("an error: " + failure, was_killed ? nullptr : &workers_[index]);
  }
  cause_ = failure_of(workers_[index], exit_code, may_restart, failure);
  run_.link.send(Failed{cause_});
}

void WorkerGroup::note_in_logs(const std::string& reason, const Worker* except) {
  for (Worker& worker : workers_) {
    watch_.read(worker);
    const std::string& log = worker.progress.notes().log;
    if (!log.empty() && &worker != except) note_end(log, reason, run_.output);
  }
}

JobFailure WorkerGroup::failure_of(const Worker& worker, int exit_code, bool may_restart,
                                   const std::string& what) const {
  const int status = worker.wait_status.value_or(0);
  const bool is_killed = worker.hang.empty() && WIFSIGNALED(status) &&
                         (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGTERM);
  const auto step = static_cast<int64_t>(worker.progress.step().value_or(0));
  return {
      {.rank = worker.rank,
       .status = WIFSIGNALED(status) ? WTERMSIG(status) : status,  // without the core dump's bit
       .step = is_killed ? -1 : step},
      context_.attempt,
      exit_code,
      may_restart,
      what};
}

void WorkerGroup::log_end(size_t index, const std::string& error) {
  const Worker& worker = workers_[index];
  run_.events.worker_ended({.rank = worker.rank,
                            .local_rank = static_cast<int>(index),
                            .pid = worker.pid,
                            .wait_status = worker.wait_status,
                            .seconds = seconds_since_start(),
                            .by_launcher = worker.ended_by_us,
                            .error = error});
}

void WorkerGroup::read_outputs() {
  run_.output.flush();
  for (size_t i = 0; outputs_are_due_ && i < workers_.size(); ++i) {
    workers_[i].pipes.read(run_.output, sink(i));
  }
  if (outputs_are_due_) watch_.read_all();
  run_.output.show_partial_lines();
}

OutputPipes::Sink WorkerGroup::sink(size_t index) {
  return [this, index](Stream stream, std::string_view bytes) {
    run_.output.write(index, stream, bytes);
  };
}

void WorkerGroup::check_progress() {
  if (!watch_.is_due()) return;
  keeper_->reap_orphans();
  continue_keeper();
  // A worker may wait for our reader (`less`, Ctrl-S) or a file server, which is no hang.
  if (run_.output.is_full()) watch_.forgive_silence();
  const bool judges = !ending_ && !first_failure_ && !is_paused_;
  watch_.check(judges);
}

// A stopped keeper does not report the ends of workers.
void WorkerGroup::continue_keeper() {
  const pid_t keeper = keeper_->pid();
  if (state_of_process(keeper) != 'T') return;
  run_.output.announce("the keeper process (pid {}) was stopped; continuing it", keeper);
  ::kill(keeper, SIGCONT);
}

void WorkerGroup::on(const NameHang& hang) {
  if (ending_ || first_failure_ || is_paused_) return;
  run_.output.announce_for_job("{}", hang.text);
  watch_.hang_was_named(hang);
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].rank == hang.rank && workers_[i].running) end_hanging(i, hang.text);
  }
}

void WorkerGroup::end_hanging(size_t index, const std::string& text) {
  Worker& worker = workers_[index];
  // This launcher sends no heartbeats meanwhile.
  const std::chrono::milliseconds patience =
      std::min<std::chrono::milliseconds>(kStackPatience, run_.options.alive_period);
  if (state_of_process(worker.pid) != 'T') {
    run_.output.announce("threads of rank {}:\n{}", worker.rank,
                         describe_threads(worker.pid, Clock::now() + patience * 4 / 5));
    abort_if_caught(worker.pid, Clock::now() + patience / 5);
  }
  worker.hang = text;
  worker.wait_status = SIGKILL;  // also if it cannot be killed
  fail_first(index, base::kExitSignalBase + SIGKILL, true, "it made no progress (--hang_timeout)");
  ::kill(-worker.pid, SIGKILL);
}

void WorkerGroup::handle_deadlines() {
  if (end_at_ && Clock::now() >= *end_at_) {
    end_at_.reset();
    if (!ending_) end_workers(SIGTERM);
    announce_at_ = Clock::now() + kAnnounceAfter;
  }
  if (announce_at_ && Clock::now() >= *announce_at_) announce_wait();
  if (!deadline_ || Clock::now() < *deadline_) return;
  if (!ending_ && left_ == Left::kHelpers) {
    run_.output.announce(
        "processes that the workers started still run after {}: {}; sending SIGTERM", grace_time(),
        describe_helpers(keeper_->pid()));
    only_helpers_were_ended_ = true;
    return end_workers(SIGTERM);
  }
  if (running() == 0) {
    killed_ = true;  // Keeper::finish() kills what is left, or spares daemons
    return;
  }
  if (!killed_) {
    run_.output.announce("workers still run {} after the signal to end, and are killed",
                         grace_time());
    return kill_workers();
  }
  // SIGKILL did not help; only the keeper goes on waiting.
  deadline_.reset();
  for (size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    if (!std::exchange(worker.running, false)) continue;
    worker.ended_by_us = true;
    if (worker.pid == 0) continue;  // not forked yet: the keeper hangs in an earlier fork
    log_end(i, "did not end after SIGKILL");
    run_.output.announce("rank {} (pid {}) did not end after SIGKILL; it is left running",
                         worker.rank, worker.pid);
  }
}

void WorkerGroup::end_workers(int signal) {
  ending_ = true;
  deadline_ =
      Clock::now() +
      (running() > 0 ? grace() : std::min<std::chrono::milliseconds>(grace(), kHelperPatience));
  keeper_->signal_workers(signal);
  keeper_->signal_workers(SIGCONT);  // a stopped worker gets the signal only then
}

std::chrono::milliseconds WorkerGroup::grace() const {
  const auto all = run_.options.shutdown_timeout;
  if (!first_failure_) return all;
  const auto& status = workers_[first_failure_->worker].wait_status;
  const bool out_of_memory = status && oom_.killed(*status);
  return out_of_memory ? std::min<std::chrono::milliseconds>(all, kOutOfMemoryPatience) : all;
}

void WorkerGroup::kill_workers() {
  killed_ = true;
  deadline_ = Clock::now() + kKillPatience;
  keeper_->signal_workers(SIGKILL);
}

void WorkerGroup::end_helpers() {
  end_at_.reset();
  announce_at_.reset();
  if (is_over()) return;
  if (!succeeded()) return end_workers(SIGTERM);
  deadline_ = Clock::now() + run_.options.shutdown_timeout;
  announce_at_ = Clock::now() + kAnnounceAfter;
}

int64_t WorkerGroup::running() const {
  return std::ranges::count(workers_, true, &Worker::running);
}

void WorkerGroup::announce_wait() {
  announce_at_.reset();
  if (running() > 0) {
    const Worker& failed = workers_[first_failure_->worker];
    run_.output.announce("rank {} failed ({}); waiting for {} to end", failed.rank,
                         ExitStatus{failed.wait_status}.in_words(),
                         base::counted(running(), "other worker"));
  } else if (!ending_ && left_ == Left::kHelpers) {
    run_.output.announce(
        "all workers have ended; waiting up to {} (--shutdown_timeout) for processes that they "
        "started: {}",
        grace_time(), describe_helpers(keeper_->pid()));
  }
}

GroupResult WorkerGroup::result() {
  const auto write = [this](const std::string& why) {
    return write_flight_file(why, context_, workers_, run_.logs, run_.output);
  };
  if (first_failure_) {
    const Worker& worker = workers_[first_failure_->worker];
    if (worker.start_error) return start_failure(worker, run_.command.file, cause_);
    GroupResult result{
        .exit_code = exit_code_of(*worker.wait_status),
        .failure = report_of(*first_failure_, workers_, run_.logs, run_.output, oom_),
        .signal = ended_by_signal_,
        .cause = cause_};
    if (restart_may_help(*worker.wait_status)) {  // else it has said what was wrong
      result.failure->flight_file =
          write(worker.hang.empty() ? fmt::format("{} on {}", cause_.describe(), base::hostname())
                                    : worker.hang);
    }
    return result;
  }
  // Unless the user asked for log files, nobody would look for this one.
  const bool is_wanted = run_.logs.is_wanted();
  if (ended_by_signal_) {
    if (is_wanted) write("ended by " + base::signal_name(*ended_by_signal_));
    return {.exit_code = base::kExitSignalBase + *ended_by_signal_,
            .signal = ended_by_signal_,
            .cause = cause_};
  }
  if (is_wanted && stop_) write(stop_->why.what);
  return {.cause = cause_};
}

}  // namespace syncbn::launch
