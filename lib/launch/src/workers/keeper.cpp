#include "workers/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/signal_mask.h>
#include <syncbn/base/socket.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <initializer_list>
#include <utility>

#include "common/descriptors.h"

namespace syncbn::launch {
namespace {

// The launcher sends the number of a signal to pass on, or one of these.
constexpr int32_t kFinish = 0;
constexpr int32_t kFinishSparingDaemons = -1;
// serve() returns this if the launcher is gone.
constexpr int32_t kOrphaned = -2;

// A signalfd reports SIGCHLD for the process that reads it, not for the one that created it.
base::UniqueFd watch_children() {
  sigset_t child;
  ::sigemptyset(&child);
  ::sigaddset(&child, SIGCHLD);
  base::UniqueFd fd(::signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) base::throw_errno("signalfd");
  return fd;
}

// Closes all descriptors but those in `kept`, in ascending order; the standard streams become
// /dev/null.
void leave_descriptors(std::initializer_list<int> kept) {
  unsigned first = STDERR_FILENO + 1;
  for (const int one : kept) {
    const auto next = static_cast<unsigned>(one);
    if (first < next) close_descriptors(first, next - 1);
    first = next + 1;
  }
  close_descriptors(first, UINT_MAX);
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) ::dup2(null, fd);
  ::close(null);
}

// What runs in the forked process.
class KeeperProcess {
 public:
  KeeperProcess(int socket, int child_ended, const std::vector<WorkerSpec>& specs)
      : socket_(socket), child_ended_(child_ended), specs_(specs) {}

  // noexcept: this process has a copy of the launcher's frames, and an exception that unwound into
  // them would end the run a second time. Instead it aborts the keeper, which the launcher notices.
  [[noreturn]] void run(const std::function<void()>& when_orphaned,
                        std::chrono::milliseconds grace) noexcept {
    ::setsid();
    rename_process("syncbn-keeper");
    // Continues a keeper that was stopped, so that it notices that the launcher is gone.
    ::prctl(PR_SET_PDEATHSIG, SIGCONT);
    become_subreaper();
    oom_score_ = raised_oom_score();
    report(KeeperEvent::Kind::kKeeper, 0, ::getpid(), 0);
    const base::SignalMask blocked;
    // Ignored signals stay ignored across execve: workers must start with the default actions.
    for (int signal = 1; signal < NSIG; ++signal) ::signal(signal, SIG_DFL);
    const int32_t end = serve();
    const bool orphaned = end == kOrphaned;
    const auto deadline = Clock::now() + grace;
    // Waits for orphans as well: a worker may be a launcher, whose own keeper cleans up.
    while (orphaned && !children_of(::getpid()).empty() &&
           base::poll_until(child_ended_, POLLIN, deadline)) {
      reap();
    }
    kill_all_descendants(end == kFinishSparingDaemons ? Daemons::kSpare : Daemons::kKill);
    if (orphaned || launcher_is_gone()) when_orphaned();
    ::_exit(0);
  }

 private:
  void start_next() {
    const size_t worker = pids_.size();
    const pid_t keeper = ::getpid();
    const pid_t pid = ::fork();
    if (pid == 0) become_worker(worker, keeper);
    if (pid < 0) {
      report(KeeperEvent::Kind::kForkFailed, worker, 0, errno);
    } else {
      ::setpgid(pid, pid);  // in both processes, since either may run first
      report(KeeperEvent::Kind::kStarted, worker, pid, 0);
    }
    pids_.push_back(pid);
  }

  [[noreturn]] void become_worker(size_t worker, pid_t keeper) {
    const WorkerSpec& spec = specs_[worker];
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != keeper) ::_exit(base::kExitSignalBase + SIGKILL);
    set_oom_score(oom_score_);
    bind(worker);
    const int input = spec.stdin_fd >= 0 ? spec.stdin_fd : ::open("/dev/null", O_RDONLY);
    ::dup2(input, STDIN_FILENO);
    ::dup2(spec.stdout_fd, STDOUT_FILENO);
    ::dup2(spec.stderr_fd, STDERR_FILENO);
    // Closed on exec, not now: the socket has to report a failed exec.
    close_descriptors(STDERR_FILENO + 1, UINT_MAX, Closing::kOnExec);
    for (const int fd : spec.inherited) ::fcntl(fd, F_SETFD, 0);
    const auto argv = base::argv_of(spec.argv);
    const auto env = base::argv_of(spec.env);
    const base::SignalMask none_blocked(SIG_SETMASK, {});
    restore_descriptor_limit();
    ::execve(spec.file.c_str(), argv.data(), env.data());
    const int error = errno;
    report(KeeperEvent::Kind::kExecFailed, worker, ::getpid(), error);
    ::_exit(error == ENOENT ? base::kExitNotFound : base::kExitCannotExecute);
  }

  void bind(size_t worker) const {
    const std::vector<unsigned long>& mask = specs_[worker].cpu_mask;
    const size_t bytes = mask.size() * sizeof(unsigned long);
    const auto* const cpus = reinterpret_cast<const cpu_set_t*>(mask.data());
    if (mask.empty() || ::sched_setaffinity(0, bytes, cpus) == 0) return;
    report(KeeperEvent::Kind::kBindFailed, worker, ::getpid(), errno);
    ::_exit(base::kExitUnavailable);
  }

  bool launcher_is_gone() const {
    int32_t command = 0;
    return ::recv(socket_, &command, sizeof(command), MSG_DONTWAIT) == 0;
  }

  // Returns the launcher's kFinish command, or kOrphaned.
  int32_t serve() {
    bool has_all = false;
    for (;;) {
      if (!has_all && pids_.size() == specs_.size()) {
        has_all = true;
        // The workers have their ends of the pipes; another copy here would hide their end of file.
        leave_descriptors({std::min(socket_, child_ended_), std::max(socket_, child_ended_)});
        lock_memory();
      }
      const bool starts = !has_all && !stopped_;
      if (has_all) report_what_is_left();
      std::array<pollfd, 2> polls{{{socket_, POLLIN, 0}, {child_ended_, POLLIN, 0}}};
      // No signal reports that a helper has left the session.
      constexpr int kHelperPeriod = 100;  // ms
      const bool has_to_look = has_all && !any_worker_runs() && left_ != Left::kNothing;
      ::poll(polls.data(), polls.size(), starts ? 0 : has_to_look ? kHelperPeriod : -1);
      if (polls[1].revents != 0) reap();
      if (polls[0].revents == 0) {
        if (starts) start_next();
        continue;
      }
      int32_t command = 0;
      if (::recv(socket_, &command, sizeof(command), 0) != sizeof(command)) return kOrphaned;
      if (command <= 0) return command;
      pass_on(command);
    }
  }

  void pass_on(int signal) {
    for (const pid_t pid : pids_) {
      if (pid > 0) ::kill(-pid, signal);
    }
    if (!any_worker_runs()) signal_helpers(signal);
    if (signal == SIGSTOP || signal == SIGCONT) stopped_ = signal == SIGSTOP;
    if (signal == SIGSTOP || signal == SIGCONT || signal == SIGUSR1 || signal == SIGUSR2) return;
    for (; pids_.size() < specs_.size(); pids_.push_back(0)) {
      report(KeeperEvent::Kind::kNotStarted, pids_.size(), 0, 0);
    }
  }

  bool any_worker_runs() const {
    return std::ranges::any_of(pids_, [](pid_t pid) { return pid > 0; });
  }

  void report_what_is_left() {
    if (any_worker_runs()) return;
    const auto left = !helpers_of(::getpid()).empty()    ? Left::kHelpers
                      : !children_of(::getpid()).empty() ? Left::kDaemons
                                                         : Left::kNothing;
    if (std::exchange(left_, left) == left) return;
    report(KeeperEvent::Kind::kLeft, 0, 0, static_cast<int32_t>(left));
  }

  void reap() {
    signalfd_siginfo info;
    while (::read(child_ended_, &info, sizeof(info)) > 0) {
    }
    int status = 0;
    for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      const auto found = std::ranges::find(pids_, pid);
      if (found == pids_.end()) continue;  // an orphan
      *found = 0;
      report(KeeperEvent::Kind::kExited, static_cast<size_t>(found - pids_.begin()), pid, status);
    }
  }

  // Errors are ignored: serve() notices that the launcher is gone.
  void report(KeeperEvent::Kind kind, size_t worker, pid_t pid, int value) const {
    const KeeperEvent event{kind, static_cast<int32_t>(worker), pid, value};
    while (::send(socket_, &event, sizeof(event), MSG_NOSIGNAL) < 0 && errno == EINTR) {
    }
  }

  int socket_;
  int child_ended_;  // a signalfd for SIGCHLD
  const std::vector<WorkerSpec>& specs_;
  std::vector<pid_t> pids_;  // by worker, as far as started; not positive: does not run
  std::string oom_score_;    // of workers
  bool stopped_ = false;     // by SIGSTOP; no worker is started before SIGCONT
  Left left_ = Left::kWorkers;
};

pid_t sentinels_keeper = -1;

// Runs in the sentinel's process. noexcept for the same reason as KeeperProcess::run().
[[noreturn]] void watch_keeper(pid_t launcher, int socket, const std::function<void()>& run_keeper,
                               const std::function<void()>& when_orphaned) noexcept {
  ::setsid();
  rename_process("syncbn-sentinel");
  become_subreaper();
  sentinels_keeper = ::fork();
  if (sentinels_keeper == 0) run_keeper();
  if (sentinels_keeper < 0) {
    const KeeperEvent event{.kind = KeeperEvent::Kind::kForkFailed, .value = errno};
    ::send(socket, &event, sizeof(event), MSG_NOSIGNAL);
    ::_exit(base::kExitUnavailable);
  }
  // A keeper that was stopped has to notice that the launcher is gone.
  ::signal(SIGCONT, [](int) { ::kill(sentinels_keeper, SIGCONT); });
  ::prctl(PR_SET_PDEATHSIG, SIGCONT);
  const base::SignalMask continued_here(SIG_UNBLOCK, {SIGCONT});
  if (::getppid() != launcher) ::kill(sentinels_keeper, SIGCONT);
  leave_descriptors({});
  lock_memory();
  int status = 0;
  for (;;) {
    const pid_t ended = ::waitpid(sentinels_keeper, &status, 0);
    if (ended == sentinels_keeper || (ended < 0 && errno != EINTR)) break;
  }
  if (WIFSIGNALED(status)) {
    kill_all_descendants();
    // The launcher ends this process once all are gone, unless it is killed as well.
    wait_until(Clock::time_point::max(), [launcher] { return ::getppid() != launcher; });
    when_orphaned();
  }
  ::_exit(exit_code_of(status));
}

}  // namespace

Keeper::Keeper(const std::vector<WorkerSpec>& workers, const std::function<void()>& when_orphaned,
               std::chrono::milliseconds grace) {
  int ends[2];
  // SOCK_SEQPACKET keeps message boundaries, so no event is read in part.
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    base::throw_errno("cannot make the socket of the keeper process");
  }
  socket_.reset(ends[0]);
  base::UniqueFd keepers(ends[1]);
  const base::UniqueFd child_ended = watch_children();  // here, where an error can be reported
  const pid_t launcher = ::getpid();
  sentinel_ = ::fork();
  if (sentinel_ < 0) base::throw_errno("cannot start the keeper process");
  if (sentinel_ == 0) {
    socket_.reset();
    watch_keeper(
        launcher, keepers.get(),
        [&] { KeeperProcess(keepers.get(), child_ended.get(), workers).run(when_orphaned, grace); },
        when_orphaned);
  }
  keepers.reset();
  KeeperEvent first{.kind = KeeperEvent::Kind::kForkFailed};
  while (::recv(socket_.get(), &first, sizeof(first), 0) < 0 && errno == EINTR) {
  }
  if (first.kind != KeeperEvent::Kind::kKeeper) {
    // After a keeper that was killed, the sentinel waits for this process. Nothing has started yet.
    ::kill(sentinel_, SIGKILL);
    ::waitpid(sentinel_, nullptr, 0);
    if (first.value == 0) {
      throw base::UnavailableError("cannot start the keeper process: it was killed");
    }
    errno = first.value;
    base::throw_errno("cannot start the keeper process");
  }
  pid_ = first.pid;
  lock_memory();
}

std::optional<KeeperEvent> Keeper::next_event() {
  KeeperEvent event;
  const ssize_t got = ::recv(socket_.get(), &event, sizeof(event), MSG_DONTWAIT);
  if (got == sizeof(event)) return event;
  // A keeper that was killed before it read our last message shows as ECONNRESET.
  if (got == 0 || (errno != EAGAIN && errno != EINTR)) gone_ = true;
  return std::nullopt;
}

void Keeper::signal_workers(int signal) {
  const int32_t command = signal;
  ::send(socket_.get(), &command, sizeof(command), MSG_NOSIGNAL);
  ::kill(pid_, SIGCONT);  // in case it was stopped
}

void Keeper::clean_up_after_loss(std::chrono::seconds patience) {
  if (!end_sentinel(Clock::now() + patience)) return;
  kill_all_descendants(Daemons::kKill, Clock::now() + patience);
}

bool Keeper::end_sentinel(Clock::time_point deadline) const {
  // Not before its children are gone: it has to clean up if this process is killed meanwhile.
  ::kill(sentinel_, SIGCONT);  // in case it was stopped
  const bool is_clean = wait_until(deadline, [this] { return children_of(sentinel_).empty(); });
  // It would wait for the end of this process, and then remove log files that this one keeps.
  ::kill(sentinel_, SIGKILL);
  ::waitpid(sentinel_, nullptr, 0);
  return is_clean;
}

void Keeper::reap_orphans() const {
  siginfo_t ended{};
  while (::waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid > 0 &&
         ended.si_pid != sentinel_) {
    ::waitpid(std::exchange(ended.si_pid, 0), nullptr, 0);
  }
}

void Keeper::finish(std::chrono::seconds patience, Daemons daemons) {
  signal_workers(daemons == Daemons::kSpare ? kFinishSparingDaemons : kFinish);
  const auto deadline = Clock::now() + patience;
  while (!gone_ && base::poll_until(socket_.get(), POLLIN, deadline)) {
    while (next_event()) {
    }
  }
  if (gone_) end_sentinel(deadline);
}

}  // namespace syncbn::launch
