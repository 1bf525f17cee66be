#include "devices.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <thread>

namespace syncbn::launch {
namespace {

// As CUDA reads it: the list counts up to its first invalid entry.
int count_listed(std::string_view list) {
  int count = 0;
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    const std::string_view entry = list.substr(0, comma);
    if (entry.empty() || entry.front() == '-') break;
    ++count;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return count;
}

}  // namespace

int count_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  // More cores than cpu_set_t holds.
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int count_gpus() {
  // Set but empty means none, which base::env does not tell from unset.
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) return count_listed(visible);
  std::error_code error;
  const std::filesystem::directory_iterator gpus("/proc/driver/nvidia/gpus", error);
  if (error) return 0;
  return static_cast<int>(std::distance(begin(gpus), end(gpus)));
}

}  // namespace syncbn::launch
