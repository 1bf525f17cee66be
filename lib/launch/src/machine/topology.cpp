#include "machine/topology.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <climits>
#include <iterator>
#include <map>
#include <utility>

#include "common/processes.h"
#include "common/words.h"

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

Cpus common(const Cpus& a, const Cpus& b) {
  Cpus result;
  std::ranges::set_intersection(a, b, std::inserter(result, result.end()));
  return result;
}

}  // namespace

Cpus parse_cpus(std::string_view list) {
  Cpus cpus;
  if (list.ends_with('\n')) list.remove_suffix(1);
  for (const std::string& range : words_of(list)) {
    const size_t dash = range.find('-');
    const auto first = base::parse_number<int>(range.substr(0, dash));
    if (!first) continue;
    const auto last = dash == range.npos ? first : base::parse_number<int>(range.substr(dash + 1));
    for (int cpu = *first; cpu <= last.value_or(*first); ++cpu) cpus.insert(cpu);
  }
  return cpus;
}

std::string format_cpus(const Cpus& cpus) {
  return base::join(runs_in(cpus, "-"), ",");
}

std::vector<unsigned long> cpu_mask(const Cpus& cpus) {
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  const int words = cpus.empty() ? 0 : *cpus.rbegin() / kBits + 1;
  std::vector<unsigned long> mask(static_cast<size_t>(words));
  for (const int cpu : cpus) mask[static_cast<size_t>(cpu / kBits)] |= 1UL << (cpu % kBits);
  return mask;
}

Topology::Topology(fs::path sys, Cpus allowed)
    : sys_(std::move(sys)), allowed_(std::move(allowed)) {
  std::map<int, Cpus> by_id;
  for (const fs::path& entry : entries_of(sys_ / "devices/system/node")) {
    const std::string name = entry.filename();
    if (!name.starts_with("node")) continue;
    const auto id = base::parse_number<int>(name.substr(4));
    if (id) by_id[*id] = common(parse_cpus(first_line(entry / "cpulist")), allowed_);
  }
  for (auto& [id, cpus] : by_id) {
    if (cpus.empty()) continue;  // the node has only memory, or no CPU that is allowed
    const auto socket =
        base::parse_number<int>(first_line(topology_of(*cpus.begin()) / "physical_package_id"));
    nodes_.push_back({.id = id, .socket = socket.value_or(0), .cpus = std::move(cpus)});
  }
  if (nodes_.empty()) nodes_.push_back({.id = 0, .socket = 0, .cpus = allowed_});
}

std::vector<Cpus> Topology::cores(const Cpus& cpus) const {
  std::vector<Cpus> cores;
  for (Cpus left = cpus; !left.empty();) {
    const int first = *left.begin();
    const fs::path siblings = topology_of(first) / "thread_siblings_list";
    Cpus core = common(parse_cpus(first_line(siblings)), left);
    core.insert(first);  // the list may be missing
    for (const int cpu : core) left.erase(cpu);
    cores.push_back(std::move(core));
  }
  return cores;
}

std::optional<int> Topology::node_of_pci(const std::string& address) const {
  const auto node =
      base::parse_number<int>(first_line(sys_ / "bus/pci/devices" / address / "numa_node"));
  return node && *node >= 0 ? node : std::nullopt;
}

fs::path Topology::topology_of(int cpu) const {
  return sys_ / fmt::format("devices/system/cpu/cpu{}/topology", cpu);
}

}  // namespace syncbn::launch
