#include "workers/oom_watch.h"

#include <signal.h>
#include <sys/wait.h>

#include <fstream>
#include <string>

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

// A line of /proc/self/cgroup is "number:controllers:group"; version 2 has "0::group".
fs::path counter_file() {
  const fs::path root = "/sys/fs/cgroup";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string number, controllers, group; std::getline(groups, number, ':') &&
                                               std::getline(groups, controllers, ':') &&
                                               std::getline(groups, group);) {
    const bool is_v2 = controllers.empty();
    if (!is_v2 && controllers != "memory") continue;
    // In a container the path may be the host's, while the container's group is mounted as root.
    for (const fs::path& path : {fs::path(group).relative_path(), fs::path()}) {
      fs::path file =
          is_v2 ? root / path / "memory.events" : root / "memory" / path / "memory.oom_control";
      if (std::ifstream(file).good()) return file;
    }
  }
  return "/proc/vmstat";
}

}  // namespace

OomWatch::OomWatch() : file_(counter_file()), before_(kills()) {}

bool OomWatch::killed(int wait_status) const {
  return WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL && kills() > before_;
}

uint64_t OomWatch::kills() const {
  std::ifstream file(file_);
  std::string name;
  for (uint64_t count = 0; file >> name >> count;) {
    if (name == "oom_kill") return count;
  }
  return 0;
}

}  // namespace syncbn::launch
