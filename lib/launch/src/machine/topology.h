#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "machine/cpus.h"

namespace syncbn::launch {

/// How the processors that this process may use share cores, memory and sockets, as the
/// kernel tells in /sys/devices/system. Where it tells nothing there is one socket, which is one
/// NUMA node, and each processor is a core.
class Topology {
 public:
  struct Node {
    int id = 0;
    int socket = 0;
    Cpus cpus;  ///< those allowed
  };

  /// @param sys "/sys", or a folder like it.
  Topology(std::filesystem::path sys, Cpus allowed);

  const Cpus& allowed() const { return allowed_; }
  /// NUMA nodes with allowed processors, by number.
  const std::vector<Node>& nodes() const { return nodes_; }

  /// `cpus` by physical core, in the order of their first processors.
  std::vector<Cpus> cores(const Cpus& cpus) const;

  /// The NUMA node of a PCI device ("0000:dc:00.0"); empty where the firmware does not say.
  std::optional<int> node_of_pci(const std::string& address) const;

 private:
  std::filesystem::path folder_of(int cpu) const;
  Cpus siblings(int cpu) const;
  int socket_of(int cpu) const;

  std::filesystem::path sys_;
  Cpus allowed_;
  std::vector<Node> nodes_;
};

}  // namespace syncbn::launch
