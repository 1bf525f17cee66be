#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::base {

/// The number of GPUs that a CUDA program sees: from CUDA_VISIBLE_DEVICES, else the driver's list
/// in /proc, else NVML (some containers and WSL have no such list). No CUDA library is loaded.
/// Entries of CUDA_VISIBLE_DEVICES count whether or not they name a GPU that exists.
/// @param virtual_local_rank each worker gets its own entry of CUDA_VISIBLE_DEVICES, so that all
///   MIG devices count. A process that has the whole list sees only the first of them.
int count_gpus(bool virtual_local_rank = false);

/// count_gpus() without NVML, which takes longer to start than the whole launcher. std::nullopt if
/// only NVML knows.
std::optional<int> count_gpus_at_hand(bool virtual_local_rank = false);

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

/// The GPUs that a CUDA program sees, in its order. Null for a GPU that is not in `machine`, such
/// as a MIG device given by its own UUID.
std::vector<const Gpu*> visible_gpus(const std::vector<Gpu>& machine);

/// The version of NVIDIA's driver, such as "550.54.15": from /proc, else from NVML; "" if there is
/// none.
/// @param proc "/proc", or a test's copy.
std::string nvidia_driver_version(const std::filesystem::path& proc = "/proc");

/// The fraction, in [0, 1], of about the last second in which the GPU was busy. std::nullopt if
/// NVML is missing or does not know. Thread-safe.
std::optional<double> gpu_utilization(const std::string& uuid);

}  // namespace syncbn::base
