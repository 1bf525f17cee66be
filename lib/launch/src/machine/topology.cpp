#include "machine/topology.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<int> number_of(const fs::path& path) {
  std::ifstream file(path);
  int number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

Cpus common(const Cpus& a, const Cpus& b) {
  Cpus result;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(),
                        std::inserter(result, result.end()));
  return result;
}

/// The number after `prefix` in a folder's name, as in "node12".
std::optional<int> numbered(const fs::path& path, std::string_view prefix) {
  const std::string name = path.filename();
  if (!name.starts_with(prefix)) return std::nullopt;
  return base::parse_number<int>(std::string_view(name).substr(prefix.size()));
}

}  // namespace

Topology::Topology(fs::path sys, Cpus allowed)
    : sys_(std::move(sys)), allowed_(std::move(allowed)) {
  std::map<int, Cpus> by_id;
  std::error_code error;
  for (fs::directory_iterator entry(sys_ / "devices/system/node", error), end;
       !error && entry != end; entry.increment(error)) {
    const auto id = numbered(entry->path(), "node");
    if (id) by_id[*id] = common(parse_cpus(first_line(entry->path() / "cpulist")), allowed_);
  }
  for (auto& [id, cpus] : by_id) {
    // Memory alone, or nothing for us.
    if (cpus.empty()) continue;
    const int socket = socket_of(*cpus.begin());
    nodes_.push_back({.id = id, .socket = socket, .cpus = std::move(cpus)});
  }
  if (nodes_.empty()) nodes_.push_back({.id = 0, .socket = 0, .cpus = allowed_});
}

std::vector<Cpus> Topology::cores(const Cpus& cpus) const {
  std::vector<Cpus> cores;
  for (Cpus left = cpus; !left.empty();) {
    const int first = *left.begin();
    Cpus core = common(siblings(first), left);
    core.insert(first);  // the kernel may not list it
    for (const int cpu : core) left.erase(cpu);
    cores.push_back(std::move(core));
  }
  return cores;
}

std::optional<int> Topology::node_of_pci(const std::string& address) const {
  const auto node = number_of(sys_ / "bus/pci/devices" / address / "numa_node");
  return node && *node >= 0 ? node : std::nullopt;
}

fs::path Topology::folder_of(int cpu) const {
  return sys_ / fmt::format("devices/system/cpu/cpu{}", cpu);
}

Cpus Topology::siblings(int cpu) const {
  return parse_cpus(first_line(folder_of(cpu) / "topology/thread_siblings_list"));
}

int Topology::socket_of(int cpu) const {
  return number_of(folder_of(cpu) / "topology/physical_package_id").value_or(0);
}

}  // namespace syncbn::launch
