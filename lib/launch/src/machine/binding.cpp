#include "machine/binding.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <iterator>
#include <map>

namespace syncbn::launch {
namespace {

using Node = Topology::Node;

// Divides the groups into consecutive runs, one per worker, whose lengths differ by at most one.
std::vector<Cpus> shares(const std::vector<Cpus>& groups, size_t workers) {
  std::vector<Cpus> result(workers);
  const size_t least = groups.size() / workers;
  const size_t longer = groups.size() % workers;
  auto group = groups.begin();
  for (size_t worker = 0; worker < workers; ++worker) {
    const auto end = group + static_cast<std::ptrdiff_t>(least + (worker < longer ? 1 : 0));
    for (; group != end; ++group) result[worker].insert(group->begin(), group->end());
  }
  return result;
}

std::vector<Cpus> bind_to_cores(const Topology& topology, size_t workers) {
  std::vector<Cpus> cores;
  for (const Node& node : topology.nodes()) {
    for (Cpus& core : topology.cores(node.cpus)) cores.push_back(std::move(core));
  }
  if (cores.size() >= workers) return shares(cores, workers);
  throw base::UserError(fmt::format(
      "--bind=cores: {} workers need a core each, and this process may run on {} (CPU {}); start "
      "fewer workers, or leave --bind out",
      workers, cores.size(), format_cpus(topology.allowed())));
}

const Node& node_of_gpu(const Topology& topology, int gpu, int id) {
  const auto& nodes = topology.nodes();
  const auto found = std::ranges::find(nodes, id, &Node::id);
  if (found != nodes.end()) return *found;
  throw base::UserError(fmt::format(
      "--numa_binding: GPU {} is at NUMA node {}, where this process may use no core (it has CPU "
      "{}); widen its CPU set, or leave --numa_binding out",
      gpu, id, format_cpus(topology.allowed())));
}

// The NUMA node of each worker.
std::vector<const Node*> homes(const Topology& topology, size_t workers,
                               const std::vector<std::optional<int>>& gpu_nodes) {
  const auto& nodes = topology.nodes();
  std::vector<const Node*> result;
  for (size_t worker = 0; worker < workers; ++worker) {
    const bool has_gpu = worker < gpu_nodes.size();
    if (has_gpu && gpu_nodes[worker]) {
      result.push_back(&node_of_gpu(topology, static_cast<int>(worker), *gpu_nodes[worker]));
    } else if (gpu_nodes.empty() || nodes.size() == 1) {
      result.push_back(&nodes[worker * nodes.size() / workers]);
    } else {
      throw base::UserError(fmt::format(
          "--numa_binding: no NUMA node is known for local rank {}, since {}; use --bind=cores, or "
          "set CUDA_VISIBLE_DEVICES to nothing if the workers need no GPU",
          worker,
          has_gpu ? fmt::format("the kernel does not report the node of GPU {}", worker)
                  : fmt::format("CUDA sees {}", base::counted(std::ssize(gpu_nodes), "GPU"))));
    }
  }
  return result;
}

std::vector<Cpus> bind_on_node(const Topology& topology, Binding binding, const Node& home,
                               size_t workers) {
  if (binding == Binding::kExclusive) {
    const std::vector<Cpus> cores = topology.cores(home.cpus);
    if (cores.size() >= workers) return shares(cores, workers);
    throw base::UserError(fmt::format(
        "--numa_binding=exclusive: NUMA node {} has {} (CPU {}) for {} workers; "
        "start fewer, or use --bind=cores or --numa_binding=node",
        home.id, base::counted(std::ssize(cores), "core"), format_cpus(home.cpus), workers));
  }
  Cpus cpus = home.cpus;
  for (const Node& node : topology.nodes()) {
    if (binding != Binding::kSocket || node.socket != home.socket) continue;
    cpus.insert(node.cpus.begin(), node.cpus.end());
  }
  return std::vector<Cpus>(workers, cpus);
}

}  // namespace

std::vector<std::optional<int>> nodes_of_visible_gpus(const Topology& topology,
                                                      const std::vector<base::Gpu>& machine) {
  std::vector<std::optional<int>> nodes;
  for (const base::Gpu* const gpu : base::visible_gpus(machine)) {
    nodes.push_back(gpu == nullptr ? std::nullopt : topology.node_of_pci(gpu->address));
  }
  return nodes;
}

std::vector<Cpus> bind_workers(const Topology& topology, Binding binding, int nproc_per_node,
                               const std::vector<std::optional<int>>& gpu_nodes) {
  const auto workers = static_cast<size_t>(nproc_per_node);
  if (binding == Binding::kCores) return bind_to_cores(topology, workers);
  std::map<const Node*, std::vector<size_t>> workers_of_node;
  const std::vector<const Node*> home = homes(topology, workers, gpu_nodes);
  for (size_t worker = 0; worker < workers; ++worker) {
    workers_of_node[home[worker]].push_back(worker);
  }
  std::vector<Cpus> result(workers);
  for (const auto& [node, members] : workers_of_node) {
    const std::vector<Cpus> cpus = bind_on_node(topology, binding, *node, members.size());
    for (size_t i = 0; i < members.size(); ++i) result[members[i]] = cpus[i];
  }
  return result;
}

std::vector<int> threads_of_workers(const std::vector<Cpus>& cpus, int usable) {
  std::map<int, int> sharers;
  for (const Cpus& one : cpus) {
    for (const int cpu : one) ++sharers[cpu];
  }
  const double quota = std::min(1.0, usable / static_cast<double>(sharers.size()));
  std::vector<int> threads;
  for (const Cpus& one : cpus) {
    double share = 0;
    for (const int cpu : one) share += 1.0 / sharers[cpu];
    // Rounding errors may put a sum of thirds just below its whole number.
    threads.push_back(std::max(1, static_cast<int>(share * quota + 1e-6)));
  }
  return threads;
}

}  // namespace syncbn::launch
