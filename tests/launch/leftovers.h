#pragma once

#include <sys/types.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "launch/launcher.h"
#include "support/eventually.h"

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

}  // namespace syncbn::test
