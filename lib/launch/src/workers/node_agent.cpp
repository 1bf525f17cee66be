#include "workers/node_agent.h"

#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>

namespace syncbn::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Grace period for helpers after a failure or a signal, and for daemons after success, because a
// container kills them once the launcher ends. torch_shm_manager unlinks shared memory 2 s after
// its last client.
constexpr milliseconds kHelperPatience{3000};

// Grace period for rank 0 to print a usage error that another worker found first: every worker
// finds it, but often only rank 0 prints it. With more time, rank 0 would report the other worker
// as lost.
constexpr seconds kUsageErrorPatience{1};

// Upper bound on the grace period after a worker was killed for lack of memory: until memory is
// free, the others cannot act on a signal.
constexpr milliseconds kOutOfMemoryPatience{3000};

// A wait that is shorter than this is not announced.
constexpr seconds kAnnounceAfter{1};

JobFailure failure_of(const WorkerProcess& worker, int attempt, const std::string& what) {
  const int status = worker.wait_status.value_or(0);
  const bool was_killed = worker.hang.empty() && WIFSIGNALED(status) &&
                          (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGTERM);
  const auto step = static_cast<int64_t>(worker.step.value_or(0));
  return {
      {.rank = worker.rank,
       .status = WIFSIGNALED(status) ? WTERMSIG(status) : status,  // without the core dump's bit
       .step = was_killed ? -1 : step},
      attempt,
      worker.wait_status ? exit_code_of(status) : base::kExitUnavailable,
      /*may_restart=*/!worker.start_error && restart_may_help(status),
      fmt::format("rank {} failed: {}", worker.rank, what)};
}

}  // namespace

NodeAgent::NodeAgent(const LaunchOptions& options, int attempt, int first_rank)
    : options_(options), attempt_(attempt), workers_(static_cast<size_t>(options.nproc_per_node)) {
  for (WorkerProcess& worker : workers_) worker.rank = first_rank++;
}

void NodeAgent::receive(const KeeperEvent& event, Time now) {
  if (state_ == State::kOver) return;
  now_ = now;
  using enum KeeperEvent::Kind;
  const auto index = static_cast<size_t>(event.worker);
  WorkerProcess& worker = workers_[index];
  if (event.kind == kStarted) worker.pid = event.pid;
  if (event.kind == kNotStarted) worker.running = false;
  if (event.kind == kBindFailed) worker.bind_failed = true;
  if (event.kind == kForkFailed || event.kind == kBindFailed || event.kind == kExecFailed) {
    worker.start_error = event.value;
  }
  if (event.kind == kExited && worker.hang.empty()) worker.wait_status = event.value;
  if (event.kind == kExited || event.kind == kForkFailed) worker_ended(index);
  if (event.kind == kLeft) handle_left(static_cast<Left>(event.value));
  check_if_over();
}

void NodeAgent::worker_ended(size_t index) {
  WorkerProcess& worker = workers_[index];
  worker.running = false;
  worker.ended_by_us = is_ending();
  add(Kind::kLogEnd, worker.start_error ? std::strerror(*worker.start_error) : "",
      static_cast<int>(index));
  const bool failed = worker.start_error || worker.wait_status.value_or(0) != 0;
  if (!failed || !succeeds()) return;
  const auto status = worker.start_error ? std::nullopt : worker.wait_status;
  fail(index, ExitStatus{status, worker.out_of_memory}.in_words() + worker.error);
}

void NodeAgent::fail(size_t index, const std::string& what) {
  state_ = State::kFailing;
  failed_ = index;
  cause_ = failure_of(workers_[index], attempt_, what);
  const int code = cause_->exit_code;
  deadline_ = now_;
  if (code == base::kExitUsage && index != 0) *deadline_ += kUsageErrorPatience;
  // Before the other workers notice and log what they see. A worker that has exited has logged its
  // failure itself.
  const int noted_by = code > base::kExitSignalBase ? -1 : static_cast<int>(index);
  if (code != base::kExitPreempted) add(Kind::kNote, "an error: " + cause_->what, noted_by);
  add(Kind::kFail, "");
}

void NodeAgent::handle_left(Left left) {
  const bool is_first = std::exchange(left_, left) == Left::kWorkers;
  if (left == Left::kNothing) return;
  if (is_first && state_ == State::kRunning) {
    state_ = State::kFinishing;
    deadline_ = now_ + options_.shutdown_timeout;
    announce_at_ = now_ + kAnnounceAfter;
  } else if (is_first && state_ != State::kKilling) {
    announce_at_.reset();
    end_workers(SIGTERM);
  }
  if (left == Left::kDaemons && state_ == State::kFinishing) deadline_ = now_ + kHelperPatience;
}

void NodeAgent::check_if_over() {
  if (running() == 0 && (left_ == Left::kNothing || state_ == State::kKilling)) {
    state_ = State::kOver;
  }
}

void NodeAgent::receive(const Stop& message, Time now) {
  now_ = now;
  const JobFailure& why = message.why;
  if ((why.attempt >= 0 && why.attempt != attempt_) || !succeeds()) return;
  cause_ = why;
  if (options_.message_scope != MessageScope::kOwnWorkers) {
    const bool is_of_job = options_.message_scope == MessageScope::kWholeJob;
    add(Kind::kSay, fmt::format("{}; ending the workers of {}", why.what,
                                is_of_job ? "all nodes" : "this node"));
  }
  if (message.failed) add(Kind::kNote, "an error: " + why.what);
  end_workers(SIGTERM);
}

void NodeAgent::receive(const NameHang& message, Time now) {
  now_ = now;
  if (!expects_progress()) return;
  add(Kind::kNameHang, message.text, message.stops_time ? 1 : 0);
  for (size_t i = 0; i < workers_.size(); ++i) {
    WorkerProcess& worker = workers_[i];
    if (worker.rank != message.rank || !worker.running) continue;
    add(Kind::kShowThreads, "", static_cast<int>(i));
    worker.hang = message.text;
    worker.wait_status = SIGKILL;  // also if it cannot be killed
    fail(i, "it made no progress (--hang_timeout)");
    add(Kind::kKill, "", static_cast<int>(i));
  }
}

void NodeAgent::receive(const Signal& event, Time now) {
  now_ = now;
  const int signal = event.number;
  const bool ends =
      signal != SIGUSR1 && signal != SIGUSR2 && signal != SIGSTOP && signal != SIGCONT;
  if (!ends) {
    if (signal == SIGSTOP || signal == SIGCONT) paused_ = signal == SIGSTOP;
    return add(Kind::kSignal, "", signal);
  }
  if (std::exchange(was_signalled_, true)) {
    kill_workers();
    return check_if_over();
  }
  if (!failed_) cause_ = ended_by_signal(attempt_, signal);
  // If the workers are ending already, their grace period goes on.
  if (!is_ending()) end_workers(signal);
}

void NodeAgent::lose_keeper(pid_t keeper, Time now) {
  now_ = now;
  const bool was_well = succeeds();
  state_ = State::kOver;
  if (running() == 0) return;
  const std::string what =
      fmt::format("the keeper process (pid {}) was killed; all workers have been killed", keeper);
  if (was_well) {
    cause_ = job_failure(attempt_, base::kExitUnavailable, what);
    // A job that can go on without this node treats it as lost.
    if (!options_.nodes_may_change()) add(Kind::kFail, "");
    return add(Kind::kGiveUp, "");
  }
  add(Kind::kSay, what);
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (!std::exchange(workers_[i].running, false)) continue;
    workers_[i].ended_by_us = true;
    add(Kind::kLogEnd, "killed with the keeper process", static_cast<int>(i));
  }
}

void NodeAgent::tick(Time now) {
  now_ = now;
  if (announce_at_ && now >= *announce_at_) announce_wait();
  if (deadline_ && now >= *deadline_) pass_deadline();
}

NodeAgent::Time NodeAgent::due() const {
  return std::min(deadline_.value_or(Time::max()), announce_at_.value_or(Time::max()));
}

void NodeAgent::pass_deadline() {
  deadline_.reset();
  const std::string time = base::format_seconds(grace());
  if (state_ == State::kFailing) {
    announce_at_ = now_ + kAnnounceAfter;
    end_workers(SIGTERM);
  } else if (state_ == State::kFinishing && left_ == Left::kHelpers) {
    add(Kind::kSayHelpers,
        "processes that the workers started still run after " + time + ", and get SIGTERM");
    end_workers(SIGTERM);
  } else if (state_ == State::kEnding && running() > 0) {
    add(Kind::kSay,
        fmt::format("workers still run {} after the signal to end, and are killed", time));
    kill_workers();
  } else {
    if (state_ == State::kKilling) abandon_workers();
    state_ = State::kOver;  // Keeper::finish() kills what is left, or spares daemons
  }
}

// SIGKILL did not help; only the keeper goes on waiting.
void NodeAgent::abandon_workers() {
  for (size_t i = 0; i < workers_.size(); ++i) {
    WorkerProcess& worker = workers_[i];
    if (!std::exchange(worker.running, false)) continue;
    worker.ended_by_us = true;
    if (worker.pid == 0) continue;  // not forked yet: the keeper hangs in an earlier fork
    add(Kind::kLogEnd, "did not end after SIGKILL", static_cast<int>(i));
    add(Kind::kSay, fmt::format("rank {} (pid {}) did not end after SIGKILL; it is left running",
                                worker.rank, worker.pid));
  }
}

void NodeAgent::end_workers(int signal) {
  state_ = State::kEnding;
  deadline_ = now_ + (running() > 0 ? grace() : std::min(grace(), kHelperPatience));
  add(Kind::kSignal, "", signal);
  add(Kind::kSignal, "", SIGCONT);  // a stopped worker gets the signal only then
}

milliseconds NodeAgent::grace() const {
  const milliseconds all = options_.shutdown_timeout;
  const bool out_of_memory = failed_ && workers_[*failed_].out_of_memory;
  return out_of_memory ? std::min(all, kOutOfMemoryPatience) : all;
}

void NodeAgent::kill_workers() {
  state_ = State::kKilling;
  deadline_ = now_ + kKillPatience;
  add(Kind::kSignal, "", SIGKILL);
}

void NodeAgent::announce_wait() {
  announce_at_.reset();
  if (running() > 0) {
    const WorkerProcess& failed = workers_[*failed_];
    add(Kind::kSay, fmt::format("rank {} failed ({}); waiting for {} to end", failed.rank,
                                ExitStatus{failed.wait_status}.in_words(),
                                base::counted(running(), "other worker")));
  } else if (state_ == State::kFinishing && left_ == Left::kHelpers) {
    add(Kind::kSayHelpers,
        fmt::format("all workers have ended; waiting up to {} (--shutdown_timeout) for processes "
                    "that they started",
                    base::format_seconds(grace())));
  }
}

int64_t NodeAgent::running() const {
  return std::ranges::count(workers_, true, &WorkerProcess::running);
}

}  // namespace syncbn::launch
