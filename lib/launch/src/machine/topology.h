#pragma once

#include <syncbn/base/cpus.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

using base::allowed_cpus;
using base::Cpus;

/// Reads the kernel's notation, "0-3,8". Entries that are not numbers are ignored.
Cpus parse_cpus(std::string_view list);
std::string format_cpus(const Cpus& cpus);

/// A mask for sched_setaffinity.
std::vector<unsigned long> cpu_mask(const Cpus& cpus);

/// How the CPUs that this process may use share cores, NUMA nodes and sockets, from
/// /sys/devices/system. Without that information there is one socket with one node, and each CPU is
/// a core.
class Topology {
 public:
  struct Node {
    int id = 0;
    int socket = 0;
    Cpus cpus;  ///< the allowed ones
  };

  /// @param sys "/sys", or a test's copy.
  Topology(std::filesystem::path sys, Cpus allowed);

  const Cpus& allowed() const { return allowed_; }
  /// NUMA nodes with allowed CPUs, by number.
  const std::vector<Node>& nodes() const { return nodes_; }

  /// `cpus` grouped by physical core, in the order of each core's first CPU.
  std::vector<Cpus> cores(const Cpus& cpus) const;

  /// The NUMA node of a PCI device ("0000:dc:00.0"); empty if the firmware does not report it.
  std::optional<int> node_of_pci(const std::string& address) const;

 private:
  std::filesystem::path topology_of(int cpu) const;

  std::filesystem::path sys_;
  Cpus allowed_;
  std::vector<Node> nodes_;
};

}  // namespace syncbn::launch
