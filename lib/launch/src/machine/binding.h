#pragma once

#include <syncbn/launch/options.h>

#include <optional>
#include <vector>

#include "machine/cpus.h"
#include "machine/topology.h"

namespace syncbn::launch {

/// The processors of each worker, by local rank.
///
/// kCores shares the cores out evenly, in their order. The others, torchrun's, begin with a NUMA
/// node for each worker: that of its GPU, whose number is the local rank; where there are fewer
/// GPUs than workers, or the firmware does not say where they are, the workers are spread over the
/// nodes evenly, neighbours together.
///
/// @param gpu_nodes the NUMA node of each GPU, where it is known.
/// @throws base::UserError when there are too few cores, or none on the node of a GPU.
std::vector<Cpus> bind_workers(const Topology& topology, Binding binding, int nproc_per_node,
                               const std::vector<std::optional<int>>& gpu_nodes);

/// How many threads keep the processors of each worker busy, where several workers may share them.
std::vector<int> threads_of_workers(const std::vector<Cpus>& cpus);

}  // namespace syncbn::launch
