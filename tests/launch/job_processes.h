#pragma once

#include <sys/types.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace syncbn::test {

/// Processes with `marker` in their environment: it is inherited by all of a job, whatever they do.
inline std::vector<pid_t> job_processes(const std::string& marker) {
  std::vector<pid_t> pids;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    std::ifstream file(entry.path() / "environ");
    const std::string environment(std::istreambuf_iterator<char>(file), {});
    if (environment.find(marker) != std::string::npos) pids.push_back(pid);
  }
  return pids;
}

/// Those of them that run the program `name`, as `ps -o comm` shows it.
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

}  // namespace syncbn::test
