#pragma once

#include <c10/core/Device.h>

#include <vector>

#include <syncbn/dist/process_group.h>

namespace syncbn::train {

/// Numbers of each rank put together over all ranks, in float64: counts stay exact. Every rank
/// calls it; `device` is where the default group exchanges tensors.
std::vector<double> all_reduced(const std::vector<double>& own, c10d::ReduceOp op,
                                at::Device device);

}  // namespace syncbn::train
