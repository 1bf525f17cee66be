#include <syncbn/dist/spawn.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/held_port.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/dist/process_group.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <optional>
#include <vector>

#include <ATen/Parallel.h>

#include "monitor/peer_monitor.h"
#include "monitor/plain_message.h"

namespace syncbn::dist {
namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

// Upper bound on the bytes of a message: fits into a pipe that is not read yet.
constexpr size_t kMaxMessage = 32 * 1024;

bool uses_cuda() {
  std::error_code ignored;
  for (const auto& fd : fs::directory_iterator("/proc/self/fd", ignored)) {
    if (fs::read_symlink(fd, ignored).string().starts_with("/dev/nvidia")) return true;
  }
  return false;
}

void check_can_fork(int nprocs) {
  if (nprocs < 1)
    throw base::UserError(fmt::format("spawn: nprocs must be above 0, got {}", nprocs));
  if (is_initialized()) {
    throw base::UserError(
        "spawn: this process is in a process group already; call init_process_group() in the "
        "spawned ranks only");
  }
  if (uses_cuda()) {
    throw base::UserError(
        "spawn: this process uses CUDA already, which does not survive a fork; call spawn() before "
        "anything that touches a GPU, or start the ranks with syncbn-launch");
  }
  const auto threads = std::distance(fs::directory_iterator("/proc/self/task"), {});
  if (threads != 1) {
    throw base::UserError(fmt::format(
        "spawn: this process has {} threads already, and a forked rank would have one, with the "
        "others' locks taken; call spawn() before anything that starts threads (libtorch's first "
        "parallel operation does), or start the ranks with syncbn-launch",
        threads));
  }
}

struct Child {
  pid_t pid = -1;
  base::UniqueFd process;  ///< a pidfd, readable once the child has ended
  base::UniqueFd message;  ///< a pipe with the message of its exception
  bool running = true;
};

void set_environment(int rank, int nprocs, int port) {
  const auto set = [](const char* name, int value) {
    ::setenv(name, std::to_string(value).c_str(), 1);
  };
  set("RANK", rank);
  set("LOCAL_RANK", rank);
  set("WORLD_SIZE", nprocs);
  set("LOCAL_WORLD_SIZE", nprocs);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  set("MASTER_PORT", port);
  // If this program was itself launched, the variable is about that launcher's store.
  ::unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  if (base::env("OMP_NUM_THREADS")) return;
  const int threads = std::max(1, base::usable_cpus() / nprocs);
  set("OMP_NUM_THREADS", threads);
  at::set_num_threads(threads);  // OpenMP read the variable when it was loaded
}

[[noreturn]] void run_child(const std::function<void(int)>& fn, int rank, int message) {
  int code = 0;
  try {
    fn(rank);
  } catch (const std::exception& error) {
    code = base::exit_code_of(error);
    const std::string text = detail::plain_message(error).substr(0, kMaxMessage);
    (void)!::write(message, text.data(), text.size());
  } catch (...) {
    code = base::kExitInternal;
    constexpr std::string_view kText = "an exception that is not a std::exception";
    (void)!::write(message, kText.data(), kText.size());
  }
  std::fflush(nullptr);
  detail::PeerMonitor::leave_with(code);
  // Not exit(): objects made before the fork belong to the parent.
  std::quick_exit(code);
}

/// While it lives, SIGCHLD is not ignored: if it is, waitpid() does not find children that ended.
class KeepEndedChildren {
 public:
  KeepEndedChildren() {
    struct sigaction normal {};
    normal.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, nullptr, &before_);
    if (is_ignored()) ::sigaction(SIGCHLD, &normal, nullptr);
  }
  ~KeepEndedChildren() {
    if (is_ignored()) ::sigaction(SIGCHLD, &before_, nullptr);
  }
  KeepEndedChildren(const KeepEndedChildren&) = delete;
  KeepEndedChildren& operator=(const KeepEndedChildren&) = delete;

 private:
  bool is_ignored() const {
    return before_.sa_handler == SIG_IGN || (before_.sa_flags & SA_NOCLDWAIT) != 0;
  }
  struct sigaction before_ {};
};

/// The ranks. The destructor kills those that still run.
class Children {
 public:
  Children() = default;
  ~Children() {
    signal_all(SIGKILL);
    for (Child& child : children_) {
      if (child.running) ::waitpid(child.pid, nullptr, 0);
    }
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  void start(const std::function<void(int)>& fn, int rank, int nprocs, int port) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) base::throw_errno("spawn: cannot make a pipe");
    base::UniqueFd reader(ends[0]);
    base::UniqueFd writer(ends[1]);
    const pid_t parent = ::getpid();
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid < 0) base::throw_errno(fmt::format("spawn: cannot start rank {}", rank));
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(base::kExitSignalBase + SIGKILL);
      children_.clear();  // they are the parent's
      const auto body = [&](int) {
        set_environment(rank, nprocs, port);
        fn(rank);
      };
      run_child(body, rank, writer.get());
    }
    children_.push_back({pid, {}, std::move(reader)});
    children_.back().process.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (!children_.back().process) base::throw_errno("spawn: pidfd_open");
  }

  std::vector<int> pids() const {
    std::vector<int> all;
    for (const Child& child : children_) all.push_back(child.pid);
    return all;
  }

  void signal_all(int signal) {
    for (const Child& child : children_) {
      if (child.running) ::kill(child.pid, signal);
    }
  }

  bool any_running() const {
    return std::any_of(children_.begin(), children_.end(),
                       [](const Child& child) { return child.running; });
  }

  /// Waits until a child ends, or the deadline. Returns the failure closest to the root cause.
  std::optional<SpawnError> wait(std::optional<Clock::time_point> deadline) {
    std::vector<pollfd> polls;
    for (const Child& child : children_) {
      polls.push_back({child.running ? child.process.get() : -1, POLLIN, 0});
    }
    ::poll(polls.data(), polls.size(), deadline ? base::milliseconds_until(*deadline) : -1);
    std::optional<SpawnError> worst;
    for (size_t rank = 0; rank < children_.size(); ++rank) {
      int status = 0;
      Child& child = children_[rank];
      if (!child.running || ::waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.running = false;
      auto failure = failure_of(static_cast<int>(rank), child, status);
      // A rank that reports a lost peer is a victim: prefer any other failure.
      if (failure && (!worst || worst->exit_code() == base::kExitUnavailable)) {
        worst = std::move(failure);
      }
    }
    return worst;
  }

 private:
  static std::optional<SpawnError> failure_of(int rank, const Child& child, int status) {
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return std::nullopt;
    const std::string who = fmt::format("spawn: rank {} (process {})", rank, child.pid);
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      return SpawnError{
          rank, base::kExitSignalBase + signal,
          fmt::format("{} was ended by signal {} ({})", who, signal, ::strsignal(signal))};
    }
    const int code = WEXITSTATUS(status);
    std::string text(kMaxMessage, '\0');
    // Children of the rank may keep the other end open.
    ::fcntl(child.message.get(), F_SETFL, O_NONBLOCK);
    const ssize_t got = ::read(child.message.get(), text.data(), text.size());
    text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return SpawnError{rank, code,
                      text.empty() ? fmt::format("{} ended with exit code {}", who, code)
                                   : fmt::format("{} failed: {}", who, text)};
  }

  std::vector<Child> children_;
};

}  // namespace

struct SpawnContext::State {
  State(std::chrono::milliseconds grace, base::HeldPort port)
      : grace(grace), port(std::move(port)) {}

  const KeepEndedChildren keep;
  const std::chrono::milliseconds grace;
  const base::HeldPort port;  ///< of the ranks' store
  Children children;
  std::optional<SpawnError> first;
  std::optional<Clock::time_point> kill_at;  ///< after a failure
};

SpawnContext::SpawnContext(std::unique_ptr<State> state) : state_(std::move(state)) {}
SpawnContext::SpawnContext(SpawnContext&&) noexcept = default;
SpawnContext& SpawnContext::operator=(SpawnContext&&) noexcept = default;
SpawnContext::~SpawnContext() = default;

bool SpawnContext::join(std::optional<std::chrono::milliseconds> timeout) {
  State& it = *state_;
  std::optional<Clock::time_point> until;
  if (timeout) until = Clock::now() + *timeout;
  while (it.children.any_running()) {
    if (until && Clock::now() >= *until) return false;
    auto wake = it.kill_at ? it.kill_at : until;
    if (wake && until) wake = std::min(*wake, *until);
    const auto failure = it.children.wait(wake);
    if (failure && !it.first) {
      it.first = failure;
      it.children.signal_all(SIGTERM);
      it.kill_at = Clock::now() + it.grace;
    }
    if (!it.kill_at || Clock::now() < *it.kill_at) continue;
    it.children.signal_all(SIGKILL);
    it.kill_at.reset();
  }
  if (it.first) throw SpawnError(*it.first);
  return true;
}

std::vector<int> SpawnContext::pids() const {
  return state_->children.pids();
}

SpawnContext spawn(const std::function<void(int rank)>& fn, int nprocs,
                   const SpawnOptions& options) {
  if (!fn) throw base::UserError("spawn: there is no function to run");
  check_can_fork(nprocs);
  auto port = base::HeldPort::hold(0);
  if (!port) base::throw_errno("spawn: cannot find a free port");
  SpawnContext context(std::make_unique<SpawnContext::State>(options.grace, *std::move(port)));
  for (int rank = 0; rank < nprocs; ++rank) {
    context.state_->children.start(fn, rank, nprocs, context.state_->port.port());
  }
  if (options.join) context.join();
  return context;
}

}  // namespace syncbn::dist
