#include "devices.h"

#include <fmt/format.h>
#include <sched.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <thread>
#include <vector>

namespace syncbn::launch {
namespace {

// As CUDA reads it: the list counts up to its first invalid entry.
std::vector<std::string> listed(std::string_view list) {
  std::vector<std::string> devices;
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    std::string_view entry = list.substr(0, comma);
    while (entry.starts_with(' ')) entry.remove_prefix(1);
    while (entry.ends_with(' ')) entry.remove_suffix(1);
    if (entry.empty() || entry.front() == '-') break;
    devices.emplace_back(entry);
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return devices;
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
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    return static_cast<int>(listed(visible).size());
  }
  std::error_code error;
  const std::filesystem::directory_iterator gpus("/proc/driver/nvidia/gpus", error);
  if (error) return 0;
  return static_cast<int>(std::distance(begin(gpus), end(gpus)));
}

std::string visible_gpu(int index) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return std::to_string(index);
  const std::vector<std::string> devices = listed(visible);
  if (static_cast<size_t>(index) < devices.size()) return devices[static_cast<size_t>(index)];
  throw base::UserError(
      fmt::format("--virtual_local_rank: local rank {} needs a GPU of its own, and "
                  "CUDA_VISIBLE_DEVICES={} names {}",
                  index, visible, devices.size()));
}

}  // namespace syncbn::launch
