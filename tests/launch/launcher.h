#pragma once

#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "support/eventually.h"
#include "support/program.h"
#include "support/temp_folder.h"

namespace syncbn::test {

inline const std::string kLauncher = SYNCBN_BIN_DIR "/syncbn-launch";
inline const std::string kAgentWorker = SYNCBN_TEST_BIN_DIR "/launch_agent_worker";

/// Upper bound for things that must happen within 2 s or 5 s: longer, because the test machine may
/// be busy, but shorter than the grace period (30 s).
inline constexpr std::chrono::seconds kPromptly{25};

/// Lines begin with "[rank] ", without the host name, which differs between machines.
inline Words launch_command(const Words& words) {
  return Words{kLauncher, "--prefix=[${rank}] "} + words;
}

/// Runs syncbn-launch with these arguments. OMP_NUM_THREADS is set, so that the launcher prints no
/// line about it.
inline ProgramResult launch(const std::vector<std::string>& words, RunProgramOptions options = {}) {
  options.env.emplace("OMP_NUM_THREADS", "1");
  return run_program(launch_command(words), options);
}

/// A process's state as in ps: R, S, D, T (stopped) or Z; '?' if there is no such process.
inline char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(')');
  return name_end == std::string::npos ? '?' : stat[name_end + 2];
}

/// Whether a process has ended, whether reaped or not.
inline bool has_ended(pid_t pid) {
  const char state = state_of(pid);
  return state == '?' || state == 'Z';
}

inline std::vector<pid_t> children_of(pid_t pid) {
  const std::string process = std::to_string(pid);
  std::ifstream file("/proc/" + process + "/task/" + process + "/children");
  std::vector<pid_t> pids;
  for (pid_t child = 0; file >> child;) pids.push_back(child);
  return pids;
}

/// A launcher's keeper, which is the only child of the launcher's only child, the sentinel.
inline pid_t keeper_of(pid_t launcher) {
  std::vector<pid_t> keeper;
  eventually([&] {
    const std::vector<pid_t> sentinel = children_of(launcher);
    if (!sentinel.empty()) keeper = children_of(sentinel[0]);
    return !keeper.empty();
  });
  return keeper.at(0);
}

/// A signal mask in a process's status. Signal n is bit n - 1.
inline uint64_t signal_set(pid_t pid, const std::string& name) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(name, 0) == 0) return std::stoull(line.substr(name.size()), nullptr, 16);
  }
  return 0;
}

inline bool has_signal(uint64_t set, int signal) {
  return (set >> (signal - 1) & 1) != 0;
}

/// Whether a launcher has blocked a signal, as it does before it waits for others. fork() briefly
/// blocks all signals; a blocked SIGTRAP, which no launcher blocks itself, reveals that.
inline bool launcher_blocks(pid_t pid, int signal) {
  const uint64_t blocked = signal_set(pid, "SigBlk:");
  return has_signal(blocked, signal) && !has_signal(blocked, SIGTRAP);
}

/// Whether a signal is pending for a process.
inline bool pending(pid_t pid, int signal) {
  return has_signal(signal_set(pid, "ShdPnd:"), signal);
}

}  // namespace syncbn::test
