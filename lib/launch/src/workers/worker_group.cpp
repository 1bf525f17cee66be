#include "workers/worker_group.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/agent.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/terminal.h>
#include <syncbn/base/text.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/pipe.h"
#include "common/processes.h"
#include "job/environment.h"

namespace syncbn::launch {
namespace {

// A process that SIGKILL does not end (uninterruptible in the kernel) must not hold us for ever.
constexpr std::chrono::seconds kKillPatience{5};

// Grace period for processes that the workers started, after a failure or a signal; and for daemons
// after success, since in a container they are killed once the launcher ends. torch_shm_manager
// unlinks shared memory 2 s after its last client.
constexpr std::chrono::milliseconds kHelperPatience{3000};

// All workers find a mistake in the usage by themselves, and often only rank 0 says what it is: it
// must not be ended by a quicker one before it has spoken.
constexpr std::chrono::seconds kUsageErrorPatience{1};

// Upper bound on the grace time when a worker was killed for memory: the others cannot act on a
// signal while the machine has none.
constexpr std::chrono::seconds kOutOfMemoryPatience{3};

// Workers that end faster than this after a failure leave no need to say what is being waited for.
constexpr std::chrono::seconds kAnnounceAfter{1};

// A job in the background must not take a terminal's keys; the kernel keeps only processes of the
// terminal's own session from it, and a worker is in the keeper's.
bool may_read_input() {
  return ::isatty(STDIN_FILENO) == 0 || ::tcgetpgrp(STDIN_FILENO) == ::getpgrp();
}

}  // namespace

WorkerGroup::WorkerGroup(const Run& run, const RunContext& context)
    : options_(run.options),
      command_(run.command),
      signals_(run.signals),
      output_(run.output),
      logs_(run.logs),
      events_(run.events),
      cluster_(run.cluster),
      context_(context),
      workers_(static_cast<size_t>(options_.nproc_per_node)),
      started_(Clock::now()) {}

GroupResult WorkerGroup::run() {
  start();
  while (!is_over() && !keeper_->gone()) {
    wait_for_events();
    handle_signals();
    handle_cluster();
    // What a worker said is shown before what became of it.
    read_outputs();
    handle_keeper_events();
    handle_deadlines();
  }
  if (keeper_->gone()) {
    keeper_is_lost();
  } else {
    keeper_->finish(kKillPatience, succeeded() ? Daemons::kSpare : Daemons::kKill);
  }
  // Nobody writes any more, so all of it can be read.
  for (size_t i = 0; i < workers_.size(); ++i) drain(i);
  for (size_t i = 0; i < workers_.size(); ++i) {
    output_.finish(i, Stream::kOut);
    output_.finish(i, Stream::kErr);
  }
  output_.clear_live();
  return result();
}

void WorkerGroup::start() {
  // For the orphans of a keeper that is killed.
  become_subreaper();
  std::vector<WorkerSpec> specs;
  std::vector<base::UniqueFd> workers_ends;
  for (size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    base::UniqueFd out = open_stream(i, Stream::kOut, worker.out);
    base::UniqueFd err = open_stream(i, Stream::kErr, worker.err);
    Pipe agent = Pipe::make();
    set_nonblocking(agent.reader);
    set_nonblocking(agent.writer);
    const int local_rank = static_cast<int>(i);
    worker.rank = context_.ranks.base + local_rank;
    worker.argv = worker_argv(command_, local_rank);

    Variables variables = worker_variables(options_, context_, local_rank);
    variables["TORCHELASTIC_ERROR_FILE"] = logs_.error_file(local_rank);
    variables["SYNCBN_AGENT_FD"] = std::to_string(agent.writer.get());
    variables["SYNCBN_AGENT_VERSION"] = std::to_string(SYNCBN_AGENT_VERSION);

    specs.push_back(
        {.file = command_.file,
         .argv = worker.argv,
         .env = merge_environment(variables),
         // Several readers would share out the input by chance.
         .stdin_fd = worker.rank == options_.stdin_rank && may_read_input() ? STDIN_FILENO : -1,
         .stdout_fd = out.get(),
         .stderr_fd = err.get(),
         .agent_fd = agent.writer.get()});
    if (!context_.cpus.empty()) specs.back().cpu_mask = cpu_mask(context_.cpus[i]);
    worker.agent = std::move(agent.reader);
    for (base::UniqueFd* fd : {&out, &err, &agent.writer}) workers_ends.push_back(std::move(*fd));
  }
  keeper_ = std::make_unique<Keeper>(specs, [this] { logs_.remove(); });
}

base::UniqueFd WorkerGroup::open_stream(size_t index, Stream stream, base::UniqueFd& reader) {
  const int local_rank = static_cast<int>(index);
  const bool is_out = stream == Stream::kOut;
  const Streams tee = options_.tee.of(local_rank);
  const Streams redirect = options_.redirects.of(local_rank);
  const bool tees = is_out ? tee.out : tee.err;
  const auto path = logs_.file(logs_.of_worker(local_rank), is_out ? "stdout.log" : "stderr.log");
  if (tees) output_.log_to(index, stream, path);
  if (!tees && (is_out ? redirect.out : redirect.err)) return LogFolder::open(path);
  Pipe pipe = Pipe::make();
  set_nonblocking(pipe.reader);
  reader = std::move(pipe.reader);
  return std::move(pipe.writer);
}

void WorkerGroup::wait_for_events() {
  std::vector<pollfd> polls{{signals_.fd(), POLLIN, 0}, {keeper_->fd(), POLLIN, 0}};
  for (const int fd : output_.waits_for()) polls.push_back({fd, POLLOUT, 0});
  const bool reads_out = !output_.is_full(Stream::kOut);
  const bool reads_err = !output_.is_full(Stream::kErr);
  for (const Worker& worker : workers_) {
    if (worker.out && reads_out) polls.push_back({worker.out.get(), POLLIN, 0});
    if (worker.err && reads_err) polls.push_back({worker.err.get(), POLLIN, 0});
    if (worker.agent) polls.push_back({worker.agent.get(), POLLIN, 0});
  }
  if (cluster_ != nullptr) polls.push_back({cluster_->fd(), POLLIN, 0});
  auto wake = Clock::time_point::max();
  if (cluster_ != nullptr) wake = cluster_->due();
  for (const auto& time : {end_at_, announce_at_, deadline_, progress_.due(), output_.due()}) {
    if (time) wake = std::min(wake, *time);
  }
  const int timeout_ms = wake == Clock::time_point::max() ? -1 : base::milliseconds_until(wake);
  ::poll(polls.data(), polls.size(), timeout_ms);
  // Its handle() looks at every node; a talkative worker alone is no reason.
  cluster_is_due_ =
      cluster_ != nullptr && (polls.back().revents != 0 || Clock::now() >= cluster_->due());
}

void WorkerGroup::handle_signals() {
  while (const auto signal = signals_.next()) {
    switch (*signal) {
      case SIGUSR1:
      case SIGUSR2:
      case SIGSTOP:
      case SIGCONT:
        keeper_->signal_workers(*signal);
        break;
      case SIGTSTP:
        stop_and_continue();
        break;
      case SIGWINCH:
        break;  // the next drawing asks for the width anew
      default:
        end_by_signal(*signal);
    }
  }
}

void WorkerGroup::end_by_signal(int signal) {
  if (ended_by_signal_) return kill_workers();  // the second time
  ended_by_signal_ = signal;
  if (cluster_ != nullptr) cluster_->report_signal(signal);
  // Those that end already because of a failure have what is left of their time.
  if (!ending_) end_workers(signal);
}

void WorkerGroup::handle_cluster() {
  if (cluster_ == nullptr) return;
  if (cluster_is_due_) cluster_->handle();
  // The reason may have come together with the start.
  if (ending_ || first_failure_ || cluster_->stop_reason().empty()) return;
  if (options_.voice != Voice::kOfItself) {
    output_.say(fmt::format("syncbn-launch: {}; ending the workers of {}", cluster_->stop_reason(),
                            options_.voice == Voice::kForAll ? "all nodes" : "this node"));
    stopped_for_ = cluster_->stop_reason();
  }
  end_workers(SIGTERM);
}

void WorkerGroup::tell_cluster(int exit_code, bool may_restart, const std::string& what) {
  if (cluster_ != nullptr) cluster_->report_failure(exit_code, may_restart, what);
}

void WorkerGroup::stop_and_continue() {
  output_.clear_live();
  keeper_->signal_workers(SIGSTOP);
  if (cluster_ != nullptr) cluster_->pause();
  Signals::stop_self();
  keeper_->signal_workers(SIGCONT);
}

void WorkerGroup::handle_keeper_events() {
  const bool had_failure = first_failure_.has_value();
  while (const auto event = keeper_->next_event()) handle_event(*event);
  if (had_failure || !first_failure_) return;
  const int code = exit_code_of(workers_[first_failure_->worker].wait_status.value_or(0));
  end_at_ = Clock::now();
  if (code == base::kExitUsage) *end_at_ += kUsageErrorPatience;
}

void WorkerGroup::handle_event(const KeeperEvent& event) {
  const auto index = static_cast<size_t>(event.worker);
  Worker& worker = workers_[index];
  switch (event.kind) {
    case KeeperEvent::Kind::kStarted:
      worker.pid = event.pid;
      events_.worker_started(worker.rank, static_cast<int>(index), worker.pid);
      break;
    case KeeperEvent::Kind::kForkFailed:
      worker.start_error = event.value;
      worker_ended(index);
      break;
    case KeeperEvent::Kind::kNotStarted:
      worker.running = false;
      break;
    case KeeperEvent::Kind::kBindFailed:
      worker.bind_failed = true;
      worker.start_error = event.value;
      break;
    case KeeperEvent::Kind::kExecFailed:
      worker.start_error = event.value;
      break;
    case KeeperEvent::Kind::kLeft:
      if (std::exchange(left_, static_cast<Left>(event.value)) == Left::kWorkers) end_helpers();
      if (left_ == Left::kDaemons && succeeded()) deadline_ = Clock::now() + kHelperPatience;
      break;
    case KeeperEvent::Kind::kExited:
      drain(index);  // its last words come before what is said about its end
      worker.wait_status = event.value;
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
  const std::chrono::duration<double> lived = Clock::now() - started_;
  first_failure_ = {index, std::chrono::system_clock::now(), lived.count()};
  const int code = worker.wait_status ? exit_code_of(*worker.wait_status) : base::kExitUnavailable;
  const std::string what =
      worker.start_error ? std::string("cannot be started") : describe_status(*worker.wait_status);
  tell_cluster(code, !worker.start_error && code != base::kExitUsage,
               fmt::format("rank {} failed: {}", worker.rank, what));
}

void WorkerGroup::log_end(size_t index, const std::string& error) {
  const Worker& worker = workers_[index];
  const std::chrono::duration<double> lived = Clock::now() - started_;
  events_.worker_ended({.rank = worker.rank,
                        .local_rank = static_cast<int>(index),
                        .pid = worker.pid,
                        .wait_status = worker.wait_status,
                        .seconds = lived.count(),
                        .by_launcher = worker.ended_by_us,
                        .error = error});
}

void WorkerGroup::read_outputs() {
  output_.flush();
  for (size_t i = 0; i < workers_.size(); ++i) {
    // By turns, so that one talkative worker does not silence the others for long.
    for (const Stream stream : {Stream::kOut, Stream::kErr}) {
      if (!output_.is_full(stream)) read_stream(i, stream);
    }
    read_records(i);
  }
  const auto due = progress_.due();
  if (due && Clock::now() >= *due) {
    output_.set_bar(progress_.draw(base::terminal_columns(), Clock::now()));
  }
  output_.show_partial_lines();
}

void WorkerGroup::drain(size_t index) {
  read_until_empty([&] {
    const bool more_out = read_stream(index, Stream::kOut);
    const bool more_err = read_stream(index, Stream::kErr);
    return more_out || more_err;
  });
}

bool WorkerGroup::read_stream(size_t index, Stream stream) {
  base::UniqueFd& fd = stream == Stream::kOut ? workers_[index].out : workers_[index].err;
  ReadBuffer buffer;
  const std::string_view bytes = read_some(fd, buffer);
  if (!bytes.empty()) output_.write(index, stream, bytes);
  return !bytes.empty();
}

void WorkerGroup::read_records(size_t index) {
  Worker& worker = workers_[index];
  std::array<char, 16 * sizeof(syncbn_agent_record)> buffer;
  if (!worker.agent) return;
  const ssize_t got = ::read(worker.agent.get(), buffer.data(), buffer.size());
  if (got == 0) worker.agent.reset();
  if (got <= 0) return;
  worker.records.feed({buffer.data(), static_cast<size_t>(got)},
                      [&](const syncbn_agent_record& record) {
                        if (worker.rank == 0) progress_.update(record, Clock::now());
                      });
}

void WorkerGroup::handle_deadlines() {
  if (end_at_ && Clock::now() >= *end_at_) {
    end_at_.reset();
    if (!ending_) end_workers(SIGTERM);
    announce_at_ = Clock::now() + kAnnounceAfter;
  }
  if (announce_at_ && Clock::now() >= *announce_at_) {
    announce_at_.reset();
    if (anyone_runs()) output_.say(announce_failure(workers_[first_failure_->worker]));
    if (!ending_ && left_ == Left::kHelpers) output_.say(announce_helpers());
  }
  if (!deadline_ || Clock::now() < *deadline_) return;
  if (!ending_ && left_ == Left::kHelpers) {
    output_.say(
        fmt::format("syncbn-launch: what the workers started has not ended after {}: {}; "
                    "sending SIGTERM",
                    grace_time(), describe_helpers(keeper_->pid())));
    end_workers(SIGTERM);
    return;
  }
  if (!killed_ && !anyone_runs()) {
    killed_ = true;  // the keeper does it, or spares daemons
    return;
  }
  if (!killed_) {
    output_.say(fmt::format("syncbn-launch: workers still run {} after the signal to end: killed",
                            grace_time()));
    kill_workers();
    return;
  }
  // Beyond anybody's reach; the keeper goes on waiting for them.
  deadline_.reset();
  for (size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = workers_[i];
    if (!std::exchange(worker.running, false)) continue;
    worker.ended_by_us = true;
    if (worker.pid == 0) continue;  // the keeper still hangs in the fork before
    log_end(i, "does not die; left behind");
    output_.say(fmt::format("syncbn-launch: rank {} (pid {}) does not die; left behind",
                            worker.rank, worker.pid));
  }
}

void WorkerGroup::end_workers(int signal) {
  ending_ = true;
  deadline_ =
      Clock::now() +
      (anyone_runs() ? grace() : std::min<std::chrono::milliseconds>(grace(), kHelperPatience));
  keeper_->signal_workers(signal);
  keeper_->signal_workers(SIGCONT);  // a stopped worker acts on it only then
}

std::chrono::milliseconds WorkerGroup::grace() const {
  const auto all = options_.shutdown_timeout;
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

// Once all workers have ended.
void WorkerGroup::end_helpers() {
  end_at_.reset();
  announce_at_.reset();
  if (is_over()) return;
  if (!succeeded()) return end_workers(SIGTERM);
  deadline_ = Clock::now() + options_.shutdown_timeout;
  announce_at_ = Clock::now() + kAnnounceAfter;
}

bool WorkerGroup::is_over() const {
  return !anyone_runs() && (killed_ || left_ == Left::kNothing);
}

bool WorkerGroup::succeeded() const {
  return !ending_ && !first_failure_;
}

bool WorkerGroup::anyone_runs() const {
  return std::any_of(workers_.begin(), workers_.end(),
                     [](const Worker& worker) { return worker.running; });
}

void WorkerGroup::keeper_is_lost() {
  kill_all_descendants();
  if (!anyone_runs()) return;  // it was about to end anyway
  for (size_t i = 0; i < workers_.size(); ++i) drain(i);
  output_.clear_live();
  throw base::UnavailableError(fmt::format(
      "the keeper process (pid {}) was killed; all workers have been killed", keeper_->pid()));
}

std::string WorkerGroup::announce_failure(const Worker& worker) const {
  const auto others = std::count_if(workers_.begin(), workers_.end(),
                                    [](const Worker& other) { return other.running; });
  return fmt::format("syncbn-launch: rank {} failed ({}); waiting for {} to end", worker.rank,
                     worker.end_in_words(), base::counted(others, "other worker"));
}

std::string WorkerGroup::announce_helpers() const {
  return fmt::format(
      "syncbn-launch: all workers have ended; waiting up to {} (--shutdown_timeout) for what they "
      "started: {}",
      grace_time(), describe_helpers(keeper_->pid()));
}

std::string WorkerGroup::grace_time() const {
  return base::format_seconds(std::chrono::duration<double>(grace()).count());
}

GroupResult WorkerGroup::result() {
  if (first_failure_) {
    const Worker& worker = workers_[first_failure_->worker];
    if (worker.start_error) return start_failure(worker, command_.file);
    return {.exit_code = exit_code_of(*worker.wait_status),
            .failure = report_of(*first_failure_, workers_, logs_, output_, oom_),
            .signal = ended_by_signal_};
  }
  if (ended_by_signal_) {
    return {.exit_code = base::kExitSignalBase + *ended_by_signal_, .signal = ended_by_signal_};
  }
  return {.of_job = stopped_for_};
}

}  // namespace syncbn::launch
