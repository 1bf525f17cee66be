#pragma once

#include <filesystem>

namespace syncbn::base {

/// How many CPUs the processes of this one's control group have at a time: those that are online,
/// or, as in containers, fewer by a quota of the group or of one above it (whole ones, at least 1).
/// Which of them the group (its cpuset) or this process alone may run on is not looked at.
/// @param root in front of /proc and /sys, for tests.
int available_cpus(const std::filesystem::path& root = "/");

}  // namespace syncbn::base
