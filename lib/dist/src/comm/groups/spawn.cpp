#include <syncbn/dist/spawn.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/held_port.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/dist/plain_message.h>
#include <syncbn/dist/process_group.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include "monitor/peer_monitor.h"
#include "transport/timeouts.h"

namespace syncbn::dist {
namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

// Upper bound on the bytes of a message: it must fit into a pipe that is not read yet.
constexpr size_t kMaxMessage = 32 * 1024;

// Tells a rank that a launcher's agent holds the store; the ranks of spawn() hold their own.
constexpr std::string_view kAgentStore = "TORCHELASTIC_USE_AGENT_STORE";

// Set in a rank that was started by exec: "<parent> <rank> <function>".
constexpr const char* kSpawned = "SYNCBN_SPAWNED";
/// The descriptor to which a rank started by exec writes the message of its exception.
constexpr int kMessage = 3;

bool uses_cuda() {
  std::error_code ignored;
  for (const auto& fd : fs::directory_iterator("/proc/self/fd", ignored)) {
    if (fs::read_symlink(fd, ignored).string().starts_with("/dev/nvidia")) return true;
  }
  return false;
}

void check_can_fork() {
  if (is_initialized()) {
    throw base::UserError(
        "spawn: this process is in a process group already; call init_process_group() in the "
        "spawned ranks only");
  }
  if (uses_cuda()) {
    throw base::UserError(
        "spawn: this process uses CUDA already, which does not survive a fork; call spawn() before "
        "anything that touches a GPU, or use start_method kExec");
  }
  const auto threads = std::distance(fs::directory_iterator("/proc/self/task"), {});
  if (threads != 1) {
    throw base::UserError(fmt::format(
        "spawn: this process has {} threads already, and a forked rank would have one, with the "
        "others' locks taken; call spawn() before anything that starts threads (libtorch's first "
        "parallel operation does), or use start_method kExec",
        threads));
  }
}

/// The threads of a rank; nullopt if the user has set OMP_NUM_THREADS.
std::optional<int> threads_of_rank(int nprocs) {
  if (base::env("OMP_NUM_THREADS")) return std::nullopt;
  return std::max(1, base::usable_cpus() / nprocs);
}

using Variables = std::map<std::string, std::string>;

Variables variables_of(int rank, int nprocs, int port) {
  Variables variables{
      {"RANK", std::to_string(rank)},         {"LOCAL_RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(nprocs)}, {"LOCAL_WORLD_SIZE", std::to_string(nprocs)},
      {"MASTER_ADDR", "127.0.0.1"},           {"MASTER_PORT", std::to_string(port)}};
  if (const auto threads = threads_of_rank(nprocs)) {
    variables["OMP_NUM_THREADS"] = std::to_string(*threads);
  }
  return variables;
}

void set_environment(int rank, int nprocs, int port) {
  const auto threads = threads_of_rank(nprocs);
  for (const auto& [name, value] : variables_of(rank, nprocs, port)) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  ::unsetenv(kAgentStore.data());
  if (threads) at::set_num_threads(*threads);  // OpenMP read the variable when it was loaded
}

using Functions = std::vector<std::pair<std::string, std::function<void(int)>>>;

/// The registered functions. Not a global object: other files register theirs during static
/// initialisation.
Functions& functions() {
  static Functions all;
  return all;
}

const std::function<void(int)>& registered(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& [one, fn] : functions()) names.push_back(one);
  if (std::ranges::count(names, name) > 1) {
    throw base::UserError(fmt::format(
        "spawn: several SpawnFunctions are named '{}'; give each a name of its own", name));
  }
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) {
    const std::string near = base::did_you_mean(name, names);
    throw base::UserError(fmt::format("spawn: there is no SpawnFunction '{}'{}", name,
                                      near.empty() ? "; define one outside all functions" : near));
  }
  return functions()[static_cast<size_t>(found - names.begin())].second;
}

/// Whether main() has called run_spawned_rank(), without which a rank started by exec would not run
/// its function.
bool run_spawned_rank_was_called = false;

/// Starts this program again, with only stdin, stdout, stderr and `message` (as kMessage) open: it
/// must not keep the sockets of this process's groups open.
/// @return its process id; -1, with errno, on failure
pid_t exec_self(const Variables& variables, int message) {
  std::vector<std::string> arguments;  // of this process, its name included
  std::ifstream command_line("/proc/self/cmdline");
  for (std::string word; std::getline(command_line, word, '\0');) arguments.push_back(word);
  std::vector<std::string> environment = base::environment_with(variables);
  std::erase_if(environment,
                [](const auto& entry) { return entry.substr(0, entry.find('=')) == kAgentStore; });
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, message, kMessage);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, kMessage + 1);
  pid_t pid = -1;
  // /proc/self/exe is the running file, even if its path has been replaced.
  const int error =
      ::posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, base::argv_of(arguments).data(),
                    base::argv_of(environment).data());
  ::posix_spawn_file_actions_destroy(&actions);
  errno = error;
  return error == 0 ? pid : -1;
}

/// Makes this rank end with the thread that started it.
void die_with_parent(pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(base::kExitSignalBase + SIGKILL);
}

[[noreturn]] void run_child(const std::function<void(int)>& fn, int rank, int message) {
  int code = 0;
  try {
    fn(rank);
  } catch (const std::exception& error) {
    code = base::exit_code_of(error);
    const std::string text = plain_message(error).substr(0, kMaxMessage);
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

}  // namespace

namespace detail {

struct Child {
  pid_t pid = -1;
  base::UniqueFd process;  ///< a pidfd, readable once the child has ended
  base::UniqueFd message;  ///< a pipe with the message of its exception
  bool running = true;
};

/// While it lives, SIGCHLD is not ignored: otherwise waitpid() would not find children that ended.
class KeepEndedChildren {
 public:
  KeepEndedChildren() {
    if (alive_++ > 0) return;
    struct sigaction normal {};
    normal.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, nullptr, &before_);
    if (is_ignored()) ::sigaction(SIGCHLD, &normal, nullptr);
  }
  ~KeepEndedChildren() {
    if (--alive_ == 0 && is_ignored()) ::sigaction(SIGCHLD, &before_, nullptr);
  }
  KeepEndedChildren(const KeepEndedChildren&) = delete;
  KeepEndedChildren& operator=(const KeepEndedChildren&) = delete;

 private:
  static bool is_ignored() {
    return before_.sa_handler == SIG_IGN || (before_.sa_flags & SA_NOCLDWAIT) != 0;
  }
  inline static std::atomic<int> alive_ = 0;
  inline static struct sigaction before_ {};
};

/// The spawned ranks. The destructor kills those that still run.
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

  void fork(const std::function<void(int)>& fn, int rank, int nprocs, int port) {
    start(rank, [&](int message) {
      const pid_t parent = ::getpid();
      std::fflush(nullptr);
      const pid_t pid = ::fork();
      if (pid != 0) return pid;
      die_with_parent(parent);
      children_.clear();  // they are the parent's
      const auto body = [&](int) {
        set_environment(rank, nprocs, port);
        fn(rank);
      };
      run_child(body, rank, message);
    });
  }

  void exec(const std::string& function, int rank, int nprocs, int port) {
    start(rank, [&](int message) {
      Variables variables = variables_of(rank, nprocs, port);
      variables[kSpawned] = fmt::format("{} {} {}", ::getpid(), rank, function);
      return exec_self(variables, message);
    });
  }

  std::vector<int> pids() const {
    std::vector<int> all;
    for (const Child& child : children_) all.push_back(child.pid);
    return all;
  }

  void signal_all(int signal) {
    for (const Child& child : children_) {
      // Not kill(): if other code has waited for the child, its id may belong to another process.
      if (child.running) ::syscall(SYS_pidfd_send_signal, child.process.get(), signal, nullptr, 0);
    }
  }

  bool any_running() const { return std::ranges::any_of(children_, &Child::running); }

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
      const pid_t ended = child.running ? ::waitpid(child.pid, &status, WNOHANG) : 0;
      if (ended == 0) continue;
      child.running = false;
      auto failure = ended == child.pid ? failure_of(static_cast<int>(rank), child, status)
                                        : unknown_end_of(static_cast<int>(rank), child);
      // A rank that reports a lost peer is a victim, not the root cause: prefer any other failure.
      if (failure && (!worst || worst->exit_code() == base::kExitUnavailable)) {
        worst = std::move(failure);
      }
    }
    return worst;
  }

 private:
  /// @param begin starts a process that writes its message to the given descriptor; returns its id
  template <class Begin>
  void start(int rank, const Begin& begin) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) base::throw_errno("spawn: cannot make a pipe");
    base::UniqueFd reader(ends[0]);
    const base::UniqueFd writer(ends[1]);
    const pid_t pid = begin(writer.get());
    if (pid < 0) base::throw_errno(fmt::format("spawn: cannot start rank {}", rank));
    base::UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (!process) {
      const int cause = errno;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
      errno = cause;
      base::throw_errno("spawn: pidfd_open");
    }
    children_.push_back({pid, std::move(process), std::move(reader)});
  }

  static SpawnError unknown_end_of(int rank, const Child& child) {
    return {
        rank, base::kExitInternal,
        fmt::format("spawn: rank {} (process {}) ended, but other code of this program took its "
                    "exit status; do not wait for all children (waitpid(-1), SIGCHLD handlers) "
                    "while ranks run",
                    rank, child.pid)};
  }

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
    // Children of the rank may keep the other end open, so read() must not wait.
    ::fcntl(child.message.get(), F_SETFL, O_NONBLOCK);
    const ssize_t got = ::read(child.message.get(), text.data(), text.size());
    text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return SpawnError{rank, code,
                      text.empty() ? fmt::format("{} ended with exit code {}", who, code)
                                   : fmt::format("{} failed: {}", who, text)};
  }

  std::vector<Child> children_;
};

}  // namespace detail

struct SpawnContext::State {
  State(std::chrono::milliseconds grace, base::HeldPort port)
      : grace(grace), port(std::move(port)) {}

  const detail::KeepEndedChildren keep;
  const std::chrono::milliseconds grace;
  const base::HeldPort port;  ///< of the ranks' store
  detail::Children children;
  std::optional<SpawnError> first;
  std::optional<Clock::time_point> kill_at;  ///< after a failure
};

SpawnContext::SpawnContext(std::unique_ptr<State> state) : state_(std::move(state)) {}
SpawnContext::SpawnContext(SpawnContext&&) noexcept = default;
SpawnContext& SpawnContext::operator=(SpawnContext&&) noexcept = default;
SpawnContext::~SpawnContext() = default;

bool SpawnContext::join(std::optional<std::chrono::milliseconds> timeout) {
  if (timeout && timeout->count() < 0) {
    throw base::UserError(fmt::format(
        "SpawnContext::join: the timeout must not be negative, got {} ms", timeout->count()));
  }
  State& it = *state_;
  std::optional<Clock::time_point> until;
  if (timeout) until = Clock::now() + detail::bounded(*timeout);
  while (it.children.any_running()) {
    if (until && Clock::now() >= *until) return false;
    auto wake = it.kill_at ? it.kill_at : until;
    if (wake && until) wake = std::min(*wake, *until);
    const auto failure = it.children.wait(wake);
    if (failure && !it.first) {
      it.first = failure;
      it.children.signal_all(SIGTERM);
      it.kill_at = Clock::now() + detail::bounded(it.grace);
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

template <class StartRank>
SpawnContext SpawnContext::start(int nprocs, const SpawnOptions& options,
                                 const StartRank& start_rank) {
  if (nprocs < 1) {
    throw base::UserError(fmt::format("spawn: nprocs must be above 0, got {}", nprocs));
  }
  const int usable = base::usable_cpus();
  if (!options.oversubscribe && nprocs > base::kMaxProcessesPerCpu * usable) {
    throw base::UserError(fmt::format(
        "spawn: nprocs is {}, this machine has {}, and more than {} ranks on each would stall it; "
        "start at most {}, or set oversubscribe",
        nprocs, base::counted(usable, "usable CPU"), base::kMaxProcessesPerCpu,
        base::kMaxProcessesPerCpu * usable));
  }
  auto port = base::HeldPort::hold(0);
  if (!port) base::throw_errno("spawn: cannot find a free port");
  SpawnContext context(std::make_unique<State>(options.grace, *std::move(port)));
  for (int rank = 0; rank < nprocs; ++rank) {
    start_rank(context.state_->children, rank, context.state_->port.port());
  }
  if (options.join) context.join();
  return context;
}

SpawnContext spawn(const std::function<void(int rank)>& fn, int nprocs,
                   const SpawnOptions& options) {
  if (!fn) throw base::UserError("spawn: there is no function to run");
  if (options.start_method == StartMethod::kExec) {
    throw base::UserError(
        "spawn: start_method kExec starts the program again, where only a SpawnFunction can be "
        "found; pass its name in place of a function");
  }
  check_can_fork();
  return SpawnContext::start(nprocs, options, [&](auto& children, int rank, int port) {
    children.fork(fn, rank, nprocs, port);
  });
}

SpawnContext spawn(const std::string& function, int nprocs, const SpawnOptions& options) {
  const std::function<void(int)>& fn = registered(function);
  if (!fn || options.start_method == StartMethod::kFork) return spawn(fn, nprocs, options);
  if (!run_spawned_rank_was_called) {
    throw base::UserError(
        "spawn: main() has not called run_spawned_rank(), which start_method kExec needs: without "
        "it, ranks would run main() as this process does; call it first in main()");
  }
  return SpawnContext::start(nprocs, options, [&](auto& children, int rank, int port) {
    children.exec(function, rank, nprocs, port);
  });
}

SpawnFunction::SpawnFunction(const std::string& name, std::function<void(int rank)> fn) {
  functions().emplace_back(name, std::move(fn));
}

void run_spawned_rank() {
  run_spawned_rank_was_called = true;
  const auto spawned = base::env(kSpawned);
  if (!spawned) return;
  ::unsetenv(kSpawned);  // so that programs started by the rank do not run as ranks
  std::istringstream words(*spawned);
  pid_t parent = -1;
  int rank = -1;
  std::string function;
  words >> parent >> rank;
  words.get();
  std::getline(words, function);
  die_with_parent(parent);
  ::fcntl(kMessage, F_SETFD, FD_CLOEXEC);
  ::prctl(PR_SET_NAME, program_invocation_short_name);  // exec of /proc/self/exe named it "exe"
  run_child([&](int) { registered(function)(rank); }, rank, kMessage);
}

int device_count() {
  return base::count_gpus();
}

}  // namespace syncbn::dist
