#include "job/run_context.h"

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

// torchrun's default ports.
constexpr int kStaticPort = 29500;
constexpr int kC10dPort = 29400;

std::vector<int> omp_num_threads(const LaunchOptions& options, const std::vector<Cpus>& cpus) {
  // A single worker may use all cores, which its libraries count themselves.
  if (options.nproc_per_node == 1 || base::env("OMP_NUM_THREADS")) return {};
  if (!cpus.empty()) return threads_of_workers(cpus);
  const auto workers = static_cast<size_t>(options.nproc_per_node);
  return std::vector<int>(workers, std::max(1, base::usable_cpus() / options.nproc_per_node));
}

std::vector<Cpus> bound_cpus(const LaunchOptions& options) {
  if (options.binding == Binding::kNone) return {};
  const Topology topology("/sys", allowed_cpus());
  std::vector<std::optional<int>> gpu_nodes;
  // machine_gpus() may load NVML, which is slow.
  if (options.binding != Binding::kCores) {
    gpu_nodes = nodes_of_visible_gpus(topology, machine_gpus());
  }
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

RunContext make_run_context(const LaunchOptions& options) {
  RunContext context;
  context.master_addr = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  const int default_port = options.c10d ? kC10dPort : kStaticPort;
  context.master_port = options.master_port.value_or(options.nnodes.max > 1 ? default_port : 0);
  context.job_id = base::random_id();
  context.run_id = options.standalone ? context.job_id : options.run_id;
  context.cpus = cpus_of_workers(options);
  context.omp_num_threads = omp_num_threads(options, context.cpus);
  context.nodes = options.nnodes.max;
  context.agent_store = context.nodes > 1;
  context.node = std::max(0, options.node_rank);
  const int first = context.node * options.nproc_per_node;
  const int all = context.nodes * options.nproc_per_node;
  context.ranks = {first, all, first, all};
  return context;
}

}  // namespace syncbn::launch
