#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "preflight/gpu_check.h"

namespace syncbn::launch {

/// What --preflight has measured on a node and of its connection to the next one.
struct MachineFigures {
  ShownText host = {};
  /// Of syncbn-launch, the kernel, the C library and NVIDIA's driver, by name; without a driver "".
  std::map<std::string, ShownText> versions = {};
  int cores = 0;            ///< that the workers may use
  double core_rate = 0;     ///< of the median core, in floating point operations per second
  double slowest_rate = 0;  ///< of the slowest core
  int slowest_core = 0;     ///< its number
  uint64_t memory = 0;      ///< available bytes
  int gpus = 0;             ///< that CUDA_VISIBLE_DEVICES or the driver's list names
  std::vector<GpuFigures> gpu_figures = {};  ///< of those that CUDA finds
  double disk_rate = 0;                      ///< bytes per second that reach the disk of the folder
  ShownText disk_error = {};                 ///< why nothing can be written there, or ""
  uint64_t open_files = 0;                   ///< ulimit -Hn
  uint64_t processes = 0;                    ///< ulimit -Hu
  uint64_t shared_memory = 0;                ///< free bytes of /dev/shm
  double round_trip = 0;                     ///< seconds, to the next node and back
  double link_rate = 0;       ///< bytes per second to the next node, while all nodes send
  double clock_ahead = 0;     ///< seconds by which the next node's clock is ahead of this one's
  ShownText link_error = {};  ///< why the next node cannot be reached, or ""
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuFigures, model, address, memory, memory_rate, error)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MachineFigures, host, versions, cores, core_rate, slowest_rate,
                                   slowest_core, memory, gpus, gpu_figures, disk_rate, disk_error,
                                   open_files, processes, shared_memory, round_trip, link_rate,
                                   clock_ahead, link_error)

/// Measures all but the connection. Takes about a second, with GPUs two.
/// @param folder where to measure the disk.
MachineFigures measure_machine(const std::string& folder);

/// What the figures of all nodes show.
struct PreflightFindings {
  std::vector<std::string> failures;  ///< with these the job would fail
  std::vector<std::string> outliers;  ///< a node, a core or a GPU unlike the others
};
PreflightFindings judge(const std::vector<MachineFigures>& nodes);

/// A line for each node, and below them one for each GPU.
std::string table_of(const std::vector<MachineFigures>& nodes);

}  // namespace syncbn::launch
