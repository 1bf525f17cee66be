#include "workers/oom_watch.h"

#include <signal.h>
#include <sys/wait.h>

#include <fstream>
#include <string>

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

// A line of /proc/self/cgroup is "number:controllers:path"; version 2 has "0::path".
fs::path counter_file() {
  const fs::path root = "/sys/fs/cgroup";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t controllers = line.find(':') + 1;
    const size_t path = line.find(':', controllers) + 1;
    if (controllers == 0 || path == 0) continue;
    const std::string name = line.substr(controllers, path - 1 - controllers);
    const bool is_v2 = name.empty();
    if (!is_v2 && name != "memory") continue;
    // In a container the path may be the host's, while the container's group is mounted as root.
    for (const std::string& group : {line.substr(path), std::string("/")}) {
      fs::path file = is_v2 ? root / group.substr(1) / "memory.events"
                            : root / "memory" / group.substr(1) / "memory.oom_control";
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
