#include "common/processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/signal_name.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <span>
#include <sstream>
#include <thread>

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOomScore = "/proc/self/oom_score_adj";

// The limit before raise_descriptor_limit().
std::optional<rlimit> first_limit;

// What follows "pid (name) " in /proc/PID/stat; the name may contain parentheses.
std::istringstream fields_of(const fs::path& process) {
  const std::string stat = first_line(process / "stat");
  const size_t name_end = stat.rfind(')');
  return std::istringstream(name_end == std::string::npos ? "" : stat.substr(name_end + 1));
}

// For kernels without /proc/PID/task/TID/children.
std::vector<pid_t> children_by_parent(pid_t parent) {
  std::vector<pid_t> children;
  for (const fs::path& entry : entries_of("/proc")) {
    const pid_t pid = std::atoi(entry.filename().c_str());
    if (pid <= 0) continue;
    char state = 0;
    pid_t own_parent = -1;
    if (fields_of(entry) >> state >> own_parent && own_parent == parent) {
      children.push_back(pid);
    }
  }
  return children;
}

}  // namespace

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    entries.push_back(entry->path());
  }
  return entries;
}

std::string first_line(const fs::path& path) {
  return value_in(path, "");
}

std::string value_in(const fs::path& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) return line.substr(name.size());
  }
  return "";
}

char state_in(const fs::path& process) {
  char state = '?';
  fields_of(process) >> state;
  return state;
}

std::vector<pid_t> children_of(pid_t parent) {
  std::ifstream file(fmt::format("/proc/{0}/task/{0}/children", parent));
  if (!file) return children_by_parent(parent);
  std::vector<pid_t> pids;
  for (pid_t pid = 0; file >> pid;) pids.push_back(pid);
  return pids;
}

std::vector<pid_t> helpers_of(pid_t parent) {
  std::vector<pid_t> pids = children_of(parent);
  std::erase_if(pids, [session = ::getsid(parent)](pid_t pid) { return ::getsid(pid) != session; });
  return pids;
}

void signal_helpers(int signal) {
  std::vector<pid_t> pids = helpers_of(::getpid());
  for (size_t i = 0; i < pids.size(); ++i) {
    const std::vector<pid_t> more = helpers_of(pids[i]);
    pids.insert(pids.end(), more.begin(), more.end());
  }
  for (const pid_t pid : pids) ::kill(pid, signal);
}

std::string describe_helpers(pid_t parent) {
  constexpr size_t kMaxNamed = 3;
  std::vector<std::string> names;
  for (const pid_t pid : helpers_of(parent)) {
    const std::string name = first_line(fmt::format("/proc/{}/comm", pid));
    names.push_back(fmt::format("{} (pid {})", name.empty() ? "?" : base::printable(name), pid));
  }
  return base::join_some(names, ", ", kMaxNamed);
}

bool wait_until(Clock::time_point deadline, const std::function<bool()>& holds) {
  constexpr std::chrono::microseconds kMaxPeriod{5000};
  for (std::chrono::microseconds period{100};; period = std::min(2 * period, kMaxPeriod)) {
    if (holds()) return true;
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(period);
  }
}

pid_t wait_for_child(pid_t pid, Clock::time_point deadline, int* wait_status) {
  const bool is_limited = deadline != Clock::time_point::max();
  pid_t ended = 0;
  wait_until(deadline, [&] {
    ended = ::waitpid(pid, wait_status, is_limited ? WNOHANG : 0);
    return ended > 0 || (ended < 0 && errno != EINTR);
  });
  return ended;
}

void kill_all_descendants(Daemons daemons, Clock::time_point deadline) {
  // When waitpid() reports a death, the orphans that it left are already our children: looking once
  // after each death finds them all without polling.
  for (;;) {
    const bool spares = daemons == Daemons::kSpare;
    const std::vector<pid_t> pids = spares ? helpers_of(::getpid()) : children_of(::getpid());
    if (spares && pids.empty()) return;
    for (const pid_t pid : pids) ::kill(pid, SIGKILL);
    if (wait_for_child(-1, deadline) <= 0) return;
  }
}

void rename_process(std::string_view name) {
  ::prctl(PR_SET_NAME, std::string(name).c_str());
  std::istringstream fields = fields_of("/proc/self");
  constexpr int kStartOfArguments = 48;  // as proc(5) counts; `fields` begins with field 3
  std::string skipped;
  for (int field = 3; field < kStartOfArguments; ++field) fields >> skipped;
  uintptr_t begin = 0;
  uintptr_t end = 0;
  if (!(fields >> begin >> end) || begin == 0 || end <= begin) return;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the kernel reports addresses as numbers.
  const std::span<char> arguments(reinterpret_cast<char*>(begin), end - begin);
  std::ranges::fill(arguments, '\0');
  name.substr(0, arguments.size() - 1).copy(arguments.data(), arguments.size());
}

void become_subreaper() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) base::throw_errno("PR_SET_CHILD_SUBREAPER");
}

void lock_memory() {
  if (::mlockall(MCL_CURRENT | MCL_ONFAULT) == 0) return;
  // mlockall() locks nothing if the total exceeds `ulimit -l`: lock as many mappings as fit.
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    void* first = nullptr;
    void* last = nullptr;
    if (std::sscanf(line.c_str(), "%p-%p", &first, &last) != 2) continue;
    ::mlock2(first, static_cast<size_t>(static_cast<char*>(last) - static_cast<char*>(first)),
             MLOCK_ONFAULT);
  }
}

std::string raised_oom_score() {
  constexpr int kMore = 300;  // in thousandths of the machine's memory
  constexpr int kMax = 1000;  // the kernel's maximum
  int score = 0;
  return std::ifstream(kOomScore) >> score ? std::to_string(std::min(score + kMore, kMax)) : "";
}

void set_oom_score(const std::string& score) {
  const base::UniqueFd file(::open(kOomScore, O_WRONLY | O_CLOEXEC));
  [[maybe_unused]] const ssize_t written = ::write(file.get(), score.data(), score.size());
}

void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  first_limit = limit;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

void restore_descriptor_limit() {
  if (first_limit) ::setrlimit(RLIMIT_NOFILE, &*first_limit);
}

int exit_code_of(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status)
                                : base::kExitSignalBase + WTERMSIG(wait_status);
}

bool restart_may_help(int wait_status) {
  if (WIFEXITED(wait_status)) {
    const int code = WEXITSTATUS(wait_status);
    return code != base::kExitUsage && code != base::kExitPreempted;
  }
  // Schedulers send these before a job's time ends: the worker died of one because it had no
  // handler.
  return WTERMSIG(wait_status) != SIGUSR1 && WTERMSIG(wait_status) != SIGUSR2;
}

std::string ExitStatus::in_words() const {
  if (!wait_status) return "cannot be started";
  if (WIFEXITED(*wait_status)) return fmt::format("exit code {}", WEXITSTATUS(*wait_status));
  const int signal = WTERMSIG(*wait_status);
  const std::string name = base::signal_name(signal);
  if (!name.starts_with("SIG")) return "killed by " + name;
  return fmt::format("killed by signal {} ({}, {}){}", signal, name, ::strsignal(signal),
                     out_of_memory ? ", probably by the kernel's OOM killer (out of memory)" : "");
}

}  // namespace syncbn::launch
