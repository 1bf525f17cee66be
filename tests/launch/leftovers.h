#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/launcher.h"
#include "support/eventually.h"
#include "support/program.h"
#include "support/temp_folder.h"

namespace syncbn::test {

/// Processes whose folder in /proc satisfies `holds`.
inline std::vector<pid_t> processes_that(
    const std::function<bool(const std::filesystem::path&)>& holds) {
  std::vector<pid_t> pids;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid > 0 && holds(entry.path())) pids.push_back(pid);
  }
  return pids;
}

/// Processes with `marker` in their environment, which all processes of a job inherit.
inline std::vector<pid_t> job_processes(const std::string& marker) {
  return processes_that([&](const std::filesystem::path& process) {
    std::ifstream file(process / "environ");
    const std::string environment(std::istreambuf_iterator<char>(file), {});
    return environment.find(marker) != std::string::npos;
  });
}

/// Number of these processes whose program is `name`, as in `ps -o comm`.
inline size_t count_programs(const std::string& marker, const std::string& name) {
  size_t count = 0;
  for (const pid_t pid : job_processes(marker)) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/comm");
    std::string program;
    file >> program;
    if (program == name) ++count;
  }
  return count;
}

/// Processes with this working folder.
inline std::vector<pid_t> processes_in(const std::filesystem::path& folder) {
  return processes_that([&](const std::filesystem::path& process) {
    std::error_code error;
    return std::filesystem::read_symlink(process / "cwd", error) == folder;
  });
}

/// Number of processes with this marker that do not end.
inline size_t count_soon(const std::string& marker) {
  eventually([&] { return job_processes(marker).empty(); }, kPromptly);
  return job_processes(marker).size();
}

/// A job in a folder of its own, all of whose processes have a marker. Those that are left are
/// killed when this object is destroyed.
class MarkedJob {
 public:
  MarkedJob() { std::filesystem::create_directory(folder_ / "tmp"); }
  ~MarkedJob() {
    for (const pid_t pid : processes()) ::kill(pid, SIGKILL);
  }
  MarkedJob(const MarkedJob&) = delete;
  MarkedJob& operator=(const MarkedJob&) = delete;

  /// Starts the launcher.
  Program& start(const Words& words, std::map<std::string, std::string> env = {}) {
    env.insert({{"OMP_NUM_THREADS", "1"},
                {"TMPDIR", folder_ / "tmp"},
                {"SYNCBN_TEST_JOB", folder_.path()}});
    return launcher_.emplace(launch_command(words),
                             RunProgramOptions{.env = std::move(env), .cwd = folder_.path()});
  }

  Program& launcher() { return *launcher_; }
  pid_t keeper() const { return keeper_of(launcher_->pid()); }
  const TempFolder& folder() const { return folder_; }
  bool has(const std::string& file) const { return std::filesystem::exists(folder_ / file); }
  /// All processes, including the launcher and the keeper.
  std::vector<pid_t> processes() const { return job_processes(marker_); }
  size_t count(const std::string& program) const { return count_programs(marker_, program); }
  /// Number of processes that do not end, including the launcher and the keeper.
  size_t left_over() const { return count_soon(marker_); }
  bool temporaries_are_gone() const { return std::filesystem::is_empty(folder_ / "tmp"); }

 private:
  TempFolder folder_;
  const std::string marker_ = "SYNCBN_TEST_JOB=" + folder_.path().string();
  std::optional<Program> launcher_;
};

}  // namespace syncbn::test
