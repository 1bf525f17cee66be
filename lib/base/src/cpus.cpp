#include <sched.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/error.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <fstream>
#include <limits>

namespace syncbn::base {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

/// The quota of one group, in CPUs.
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

/// The smallest quota of a group and all groups above it.
double quota_up_from(const std::filesystem::path& mount, std::filesystem::path group) {
  double least = quota_of(mount);
  while (group.has_relative_path()) {
    least = std::min(least, quota_of(mount / group.relative_path()));
    group = group.parent_path();
  }
  return least;
}

}  // namespace

Cpus allowed_cpus(pid_t process) {
  // The kernel rejects a mask that is shorter than its own, and does not report its length.
  constexpr size_t kMaxBytes = 1 << 16;
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> mask(sizeof(cpu_set_t) / sizeof(unsigned long));
  const auto bytes = [&] { return mask.size() * sizeof(unsigned long); };
  while (::sched_getaffinity(process, bytes(), reinterpret_cast<cpu_set_t*>(mask.data())) != 0) {
    if (errno == ESRCH || (process != 0 && errno != EINVAL)) return {};
    if (errno != EINVAL || bytes() >= kMaxBytes) throw_errno("sched_getaffinity");
    mask.resize(2 * mask.size());
  }
  Cpus cpus;
  for (int cpu = 0; cpu < static_cast<int>(mask.size()) * kBits; ++cpu) {
    if (((mask[static_cast<size_t>(cpu / kBits)] >> (cpu % kBits)) & 1) != 0) cpus.insert(cpu);
  }
  return cpus;
}

std::vector<ControlGroup> control_groups(const std::filesystem::path& root) {
  std::vector<ControlGroup> groups;
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string number, controllers, path; std::getline(file, number, ':') &&
                                              std::getline(file, controllers, ':') &&
                                              std::getline(file, path);) {
    groups.push_back({controllers, path});
  }
  return groups;
}

int usable_cpus(size_t allowed, const std::filesystem::path& root) {
  auto cpus = static_cast<double>(allowed);
  const auto mount = root / "sys/fs/cgroup";
  for (const auto& [controllers, group] : control_groups(root)) {
    if (controllers.empty()) cpus = std::min(cpus, quota_up_from(mount, group));
    const bool has_cpu = ("," + controllers + ",").find(",cpu,") != std::string::npos;
    if (has_cpu) cpus = std::min(cpus, quota_up_from(mount / controllers, group));
  }
  return std::max(1, static_cast<int>(cpus));
}

int cpus_of_rank(int ranks) {
  const Cpus own = allowed_cpus();
  Cpus all = own;
  // The parent has started the other ranks as well, and keeps its own mask when it binds theirs.
  all.merge(allowed_cpus(::getppid()));
  return std::clamp(usable_cpus(all.size()) / ranks, 1, static_cast<int>(own.size()));
}

}  // namespace syncbn::base
