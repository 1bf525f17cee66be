#pragma once

#include <syncbn/base/gpus.h>
#include <syncbn/launch/options.h>

#include <optional>
#include <vector>

#include "machine/topology.h"

namespace syncbn::launch {

/// The NUMA nodes of the GPUs that a CUDA program sees, in its order; empty for a GPU whose node is
/// unknown.
std::vector<std::optional<int>> nodes_of_visible_gpus(const Topology& topology,
                                                      const std::vector<base::Gpu>& machine);

/// The CPUs of each worker, by local rank.
///
/// kCores divides the cores evenly, in their order. The other bindings are torchrun's: each worker
/// belongs to the NUMA node of the GPU whose number is its local rank. Without GPUs, or with one
/// node only, workers are spread evenly over the nodes, neighbours together.
///
/// @param gpu_nodes the NUMA node of each GPU; empty for a GPU whose node is unknown.
/// @throws base::UserError if there are too few cores, none on the node of a GPU, or a worker's
///   node cannot be determined.
std::vector<Cpus> bind_workers(const Topology& topology, Binding binding, int nproc_per_node,
                               const std::vector<std::optional<int>>& gpu_nodes);

/// How many threads each worker needs to use its CPUs fully. Several workers may share a CPU.
/// @param usable how many CPUs can be busy at a time: fewer than the workers' CPUs in a container
///   with a quota.
std::vector<int> threads_of_workers(const std::vector<Cpus>& cpus, int usable);

}  // namespace syncbn::launch
