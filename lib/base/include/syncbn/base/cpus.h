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
/// @param process 0: the calling thread. The result is empty if the process has ended.
Cpus allowed_cpus(pid_t process = 0);

/// A control group of this process: one line of /proc/self/cgroup.
struct ControlGroup {
  std::string controllers;  ///< "cpu,cpuacct"; empty: version 2, one group for all controllers
  std::filesystem::path path;
};
/// @param root prefix of /proc, for tests.
std::vector<ControlGroup> control_groups(const std::filesystem::path& root = "/");

/// The number of CPUs that can be busy at a time: `allowed`, or fewer if the control group of this
/// process or one above it has a quota. Rounded down, at least 1.
/// @param root prefix of /proc and /sys, for tests.
int usable_cpus(size_t allowed = allowed_cpus().size(), const std::filesystem::path& root = "/");

/// Upper bound on a job's processes per usable CPU unless the user insists: more stall the machine.
inline constexpr int kMaxProcessesPerCpu = 32;

/// The CPUs for each of `ranks` processes on this host: an equal share of usable_cpus(), at least
/// 1. A process that the launcher has bound to its own CPUs gets its whole mask.
int cpus_of_rank(int ranks);

}  // namespace syncbn::base
