#pragma once

#include <sys/types.h>

#include <cstddef>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace syncbn::base {

/// The kernel's numbers of CPUs, which are hardware threads, not cores.
using Cpus = std::set<int>;

/// The online CPUs in a process's affinity mask, which a cpuset (containers, SLURM) narrows.
/// @param process 0: the calling thread. Empty if the process has ended.
Cpus allowed_cpus(pid_t process = 0);

/// A control group of this process, a line of /proc/self/cgroup.
struct ControlGroup {
  std::string controllers;  ///< "cpu,cpuacct"; empty: version 2, which has one group for all
  std::filesystem::path path;
};
/// @param root prefix of /proc, for tests.
std::vector<ControlGroup> control_groups(const std::filesystem::path& root = "/");

/// The number of CPUs that can be busy at a time: `allowed`, or fewer if the control group of this
/// process or one above it has a quota. Rounded down, at least 1.
/// @param root prefix of /proc and /sys, for tests.
int usable_cpus(size_t allowed = allowed_cpus().size(), const std::filesystem::path& root = "/");

/// More processes of a job on each usable CPU stall the machine: refused unless the user insists.
inline constexpr int kMaxProcessesPerCpu = 32;

/// The share of one of `ranks` processes on this host in usable_cpus(), at least 1. A process that
/// the launcher has bound to its own CPUs gets its whole mask.
int cpus_of_rank(int ranks);

}  // namespace syncbn::base
