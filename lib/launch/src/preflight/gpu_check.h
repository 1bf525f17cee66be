#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/json_messages.h"

namespace syncbn::launch {

/// What --preflight has measured on a GPU.
struct GpuFigures {
  ShownText model = {};    ///< "NVIDIA H100 80GB HBM3"
  ShownText address = {};  ///< on the PCI bus
  uint64_t memory = 0;     ///< bytes
  double memory_rate = 0;  ///< bytes read and written per second
  ShownText error = {};    ///< why it cannot be used, or ""
};

/// Measures the GPUs that CUDA_VISIBLE_DEVICES shows, all at the same time, for about a second.
/// Only a child of this process loads the driver, so that one that hangs or crashes ends the child.
/// This process must have no other threads.
/// @param listed the expected number of GPUs; 0: measures none; empty: unknown, and a driver that
/// does not start means that there is none
/// @param patience for all; a GPU that has not answered by then has an `error`
/// @return in CUDA's order; one GPU with an `error` if the driver does not start
std::vector<GpuFigures> measure_gpus(std::optional<int> listed, std::chrono::milliseconds patience);

}  // namespace syncbn::launch
