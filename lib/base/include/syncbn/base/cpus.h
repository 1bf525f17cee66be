#pragma once

#include <sys/types.h>

#include <cstddef>
#include <filesystem>
#include <set>

namespace syncbn::base {

/// CPUs by the kernel's numbers: hardware threads, not cores.
using Cpus = std::set<int>;

/// The online CPUs in a process's affinity mask, which a cpuset (containers, SLURM) narrows.
/// @param process 0 is the calling thread. A process that has ended has none.
Cpus allowed_cpus(pid_t process = 0);

/// How many CPUs can run at a time: `allowed`, or fewer if this process's control group or one
/// above it has a quota. Rounded down, at least 1.
/// @param root prefix of /proc and /sys, for tests.
int usable_cpus(size_t allowed = allowed_cpus().size(), const std::filesystem::path& root = "/");

/// This process's share of usable_cpus(), at least 1, if `ranks` processes like it run on this
/// host: all of its mask if the launcher bound it to CPUs of its own.
int cpus_of_rank(int ranks);

}  // namespace syncbn::base
