#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "machine/topology.h"

namespace syncbn::launch {

/// GPUs that a CUDA program would see: CUDA_VISIBLE_DEVICES, else the driver's list in /proc, else
/// (in some containers, WSL) NVML, which is loaded for that moment; no CUDA library is. Of MIG
/// devices a process sees only the first, so several count only where each worker gets its own.
int count_gpus(bool virtual_local_rank);

/// The same without NVML, whose start takes longer than all else that a launch does. Empty where
/// only NVML could tell.
std::optional<int> count_gpus_at_hand(bool virtual_local_rank);

/// The entry of CUDA_VISIBLE_DEVICES that stands for device `index`, which is below count_gpus();
/// its number where that variable is not set.
std::string visible_gpu(int index);

/// What a GPU is known by outside CUDA.
struct Gpu {
  std::string address;  ///< on the PCI bus: "0000:dc:00.0"
  std::string uuid;     ///< "GPU-…"
};

/// Of this machine, in the order of their addresses, as CUDA numbers those of one kind.
/// @param proc "/proc", or a folder like it.
std::vector<Gpu> machine_gpus(const std::filesystem::path& proc = "/proc");

/// The NUMA nodes of the GPUs that a CUDA program would see, in its order. Empty for those that
/// cannot be told, as MIG devices by their own UUIDs.
std::vector<std::optional<int>> nodes_of_visible_gpus(const Topology& topology,
                                                      const std::vector<Gpu>& machine);

}  // namespace syncbn::launch
