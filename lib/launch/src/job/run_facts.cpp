#include "job/run_facts.h"

#include <fmt/format.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/random.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <optional>

#include "machine/binding.h"
#include "machine/devices.h"
#include "machine/topology.h"

namespace syncbn::launch {
namespace {

// torchrun's, where several nodes have to agree on one.
constexpr int kStaticPort = 29500;
constexpr int kC10dPort = 29400;

std::vector<int> omp_num_threads(const LaunchOptions& options, const std::vector<Cpus>& cpus) {
  // One worker finds all of its cores itself.
  if (options.nproc_per_node == 1 || base::env("OMP_NUM_THREADS")) return {};
  if (!cpus.empty()) return threads_of_workers(cpus);
  const auto workers = static_cast<size_t>(options.nproc_per_node);
  return std::vector<int>(workers, std::max(1, base::usable_cpus() / options.nproc_per_node));
}

std::vector<Cpus> bound_cpus(const LaunchOptions& options) {
  if (options.binding == Binding::kNone) return {};
  const Topology topology("/sys", allowed_cpus());
  // What is not asked for is not loaded.
  const bool wants_gpus = options.binding != Binding::kCores;
  const auto gpu_nodes = wants_gpus ? nodes_of_visible_gpus(topology, machine_gpus())
                                    : std::vector<std::optional<int>>{};
  return bind_workers(topology, options.binding, options.nproc_per_node, gpu_nodes);
}

}  // namespace

std::vector<Cpus> cpus_of_workers(const LaunchOptions& options) {
  std::vector<Cpus> cpus = bound_cpus(options);
  constexpr int kMaxPerCore = 32;
  const int cores = base::usable_cpus();
  if (options.oversubscribe || options.nproc_per_node <= kMaxPerCore * cores) return cpus;
  throw base::UserError(fmt::format(
      "--nproc_per_node={}: this machine has {} for the workers, and more than {} workers per core "
      "would stall it; start at most {}, or add --oversubscribe",
      options.nproc_per_node, base::counted(cores, "usable core"), kMaxPerCore,
      kMaxPerCore * cores));
}

RunFacts gather_facts(const LaunchOptions& options) {
  RunFacts facts;
  facts.master_addr = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  const int default_port = options.c10d ? kC10dPort : kStaticPort;
  facts.master_port = options.master_port.value_or(options.nnodes.max > 1 ? default_port : 0);
  facts.job_id = base::random_id();
  facts.run_id = options.standalone ? facts.job_id : options.run_id;
  facts.cpus = cpus_of_workers(options);
  facts.omp_num_threads = omp_num_threads(options, facts.cpus);
  facts.nodes = options.nnodes.max;
  facts.agent_store = facts.nodes > 1;
  // Of several nodes the coordinator tells; this holds where all have as many workers.
  facts.node = std::max(0, options.node_rank);
  const int first = facts.node * options.nproc_per_node;
  const int all = facts.nodes * options.nproc_per_node;
  facts.ranks = {first, all, first, all};
  return facts;
}

}  // namespace syncbn::launch
