#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "machine/topology.h"

namespace syncbn::launch {

/// The number of GPUs that a CUDA program sees: from CUDA_VISIBLE_DEVICES, else the driver's list
/// in /proc, else NVML (some containers and WSL have no such list). No CUDA library is loaded.
/// A process sees only the first of several MIG devices, so more than one counts only with
/// `virtual_local_rank`, where each worker gets its own.
int count_gpus(bool virtual_local_rank);

/// count_gpus() without NVML, which takes longer to start than the whole launcher. Empty if only
/// NVML knows.
std::optional<int> count_gpus_at_hand(bool virtual_local_rank);

/// The entry of CUDA_VISIBLE_DEVICES for device `index`, which is below count_gpus(); the index
/// itself if that variable is not set.
std::string visible_gpu(int index);

struct Gpu {
  std::string address;  ///< on the PCI bus: "0000:dc:00.0"
  std::string uuid;     ///< "GPU-…"
};

/// The GPUs of this machine, sorted by address as CUDA numbers GPUs of one model; from the driver's
/// list in /proc, else from NVML.
/// @param proc "/proc", or a test's copy.
std::vector<Gpu> machine_gpus(const std::filesystem::path& proc = "/proc");

/// The NUMA nodes of the GPUs that a CUDA program sees, in its order; empty for a GPU whose node is
/// unknown, such as a MIG device that is given by its own UUID.
std::vector<std::optional<int>> nodes_of_visible_gpus(const Topology& topology,
                                                      const std::vector<Gpu>& machine);

}  // namespace syncbn::launch
