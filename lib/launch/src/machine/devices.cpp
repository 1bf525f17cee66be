#include "machine/devices.h"

#include <syncbn/base/text.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string_view>

#include "machine/nvml.h"

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

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

// Set but empty means none, which base::env does not tell from unset.
std::optional<std::vector<std::string>> visible_devices() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible == nullptr ? std::nullopt : std::optional(listed(visible));
}

fs::path drivers_folder(const fs::path& proc) {
  return proc / "driver/nvidia/gpus";
}

// "GPU UUID: 	 GPU-…", among others.
std::string uuid_in(const fs::path& information) {
  std::ifstream file(information);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("GPU UUID:")) return line.substr(line.find_last_of(" \t") + 1);
  }
  return "";
}

std::vector<Gpu> gpus_of_driver(const fs::path& proc) {
  std::vector<Gpu> gpus;
  std::error_code error;
  for (fs::directory_iterator entry(drivers_folder(proc), error), end; !error && entry != end;
       entry.increment(error)) {
    gpus.push_back({entry->path().filename(), uuid_in(entry->path() / "information")});
  }
  std::sort(gpus.begin(), gpus.end(),
            [](const Gpu& a, const Gpu& b) { return a.address < b.address; });
  return gpus;
}

/// The GPU that an entry of CUDA_VISIBLE_DEVICES stands for: a number, the first letters of a UUID,
/// or "MIG-<UUID>/…".
const Gpu* find_gpu(const std::string& entry, const std::vector<Gpu>& machine) {
  if (const auto number = base::parse_number<int>(entry)) {
    const auto index = static_cast<size_t>(*number);  // listed() ends before negative ones
    return index < machine.size() ? &machine[index] : nullptr;
  }
  constexpr std::string_view kMig = "MIG-";
  std::string_view uuid = entry;
  if (uuid.starts_with(kMig)) uuid.remove_prefix(kMig.size());
  uuid = uuid.substr(0, uuid.find('/'));
  const auto found = std::find_if(machine.begin(), machine.end(), [&](const Gpu& gpu) {
    return !uuid.empty() && gpu.uuid.starts_with(uuid);
  });
  return found == machine.end() ? nullptr : &*found;
}

}  // namespace

int count_gpus(bool virtual_local_rank) {
  if (const auto count = count_gpus_at_hand(virtual_local_rank)) return *count;
  return Nvml().count();
}

std::optional<int> count_gpus_at_hand(bool virtual_local_rank) {
  if (const auto visible = visible_devices()) {
    const bool only_first =
        !virtual_local_rank && !visible->empty() && visible->front().starts_with("MIG-");
    return only_first ? 1 : static_cast<int>(visible->size());
  }
  std::error_code error;
  const fs::directory_iterator gpus(drivers_folder("/proc"), error);
  if (error) return std::nullopt;
  return static_cast<int>(std::distance(begin(gpus), end(gpus)));
}

std::string visible_gpu(int index) {
  const auto visible = visible_devices();
  if (!visible) return std::to_string(index);
  return visible->at(static_cast<size_t>(index));
}

std::vector<Gpu> machine_gpus(const fs::path& proc) {
  std::error_code error;
  return fs::exists(drivers_folder(proc), error) ? gpus_of_driver(proc) : Nvml().gpus();
}

std::vector<std::optional<int>> nodes_of_visible_gpus(const Topology& topology,
                                                      const std::vector<Gpu>& machine) {
  std::vector<const Gpu*> gpus;
  if (const auto visible = visible_devices()) {
    for (const std::string& entry : *visible) gpus.push_back(find_gpu(entry, machine));
  } else {
    for (const Gpu& gpu : machine) gpus.push_back(&gpu);
  }
  std::vector<std::optional<int>> nodes;
  nodes.reserve(gpus.size());
  for (const Gpu* gpu : gpus) {
    nodes.push_back(gpu == nullptr ? std::nullopt : topology.node_of_pci(gpu->address));
  }
  return nodes;
}

}  // namespace syncbn::launch
