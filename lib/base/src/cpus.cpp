#include <syncbn/base/cpus.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace syncbn::base {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

/// What one group has, in CPUs.
double quota_of(const std::filesystem::path& group) {
  std::string quota;
  double period = 0;
  // "max 100000" or "150000 100000", in microseconds
  if (std::ifstream(group / "cpu.max") >> quota >> period) {
    return quota == "max" ? kNone : std::atof(quota.c_str()) / period;
  }
  double version_1 = 0;
  if (std::ifstream(group / "cpu.cfs_quota_us") >> version_1 &&
      std::ifstream(group / "cpu.cfs_period_us") >> period && version_1 > 0) {
    return version_1 / period;
  }
  return kNone;
}

/// Of a group and of all above it.
double quota_up_from(const std::filesystem::path& mount, std::filesystem::path group) {
  double least = quota_of(mount);
  while (group.has_relative_path()) {
    least = std::min(least, quota_of(mount / group.relative_path()));
    group = group.parent_path();
  }
  return least;
}

bool has_cpu(const std::string& controllers) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "cpu") return true;
  }
  return false;
}

}  // namespace

int available_cpus(const std::filesystem::path& root) {
  auto cpus = static_cast<double>(::sysconf(_SC_NPROCESSORS_ONLN));
  std::ifstream groups(root / "proc/self/cgroup");
  // number:controllers:group; version 2 has one for all controllers, which it does not name
  for (std::string number, controllers, group; std::getline(groups, number, ':') &&
                                               std::getline(groups, controllers, ':') &&
                                               std::getline(groups, group);) {
    const auto mount = root / "sys/fs/cgroup";
    if (controllers.empty()) cpus = std::min(cpus, quota_up_from(mount, group));
    if (has_cpu(controllers)) cpus = std::min(cpus, quota_up_from(mount / controllers, group));
  }
  return std::max(1, static_cast<int>(cpus));
}

}  // namespace syncbn::base
