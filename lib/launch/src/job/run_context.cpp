#include "job/run_context.h"

#include <fmt/format.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/random.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <ctime>
#include <optional>

#include "common/words.h"
#include "machine/binding.h"

namespace syncbn::launch {
namespace {

// torchrun's default ports.
constexpr int kStaticPort = 29500;
constexpr int kC10dPort = 29400;

std::vector<int> omp_num_threads(const LaunchOptions& options, const std::vector<Cpus>& cpus) {
  // A single worker may use all cores, and its libraries count them.
  if (options.nproc_per_node == 1 || base::env("OMP_NUM_THREADS")) return {};
  const int usable = base::usable_cpus();
  if (!cpus.empty()) return threads_of_workers(cpus, usable);
  const auto workers = static_cast<size_t>(options.nproc_per_node);
  return std::vector<int>(workers, std::max(1, usable / options.nproc_per_node));
}

}  // namespace

std::vector<Cpus> cpus_of_workers(const LaunchOptions& options) {
  std::vector<Cpus> cpus;
  if (options.binding != Binding::kNone) {
    const Topology topology("/sys", allowed_cpus());
    std::vector<std::optional<int>> gpu_nodes;
    // machine_gpus() may load NVML, which is slow.
    if (options.binding != Binding::kCores) {
      gpu_nodes = nodes_of_visible_gpus(topology, base::machine_gpus());
    }
    cpus = bind_workers(topology, options.binding, options.nproc_per_node, gpu_nodes);
  }
  const int usable = base::usable_cpus();
  if (options.oversubscribe || options.nproc_per_node <= base::kMaxProcessesPerCpu * usable) {
    return cpus;
  }
  throw base::UserError(fmt::format(
      "--nproc_per_node={}: this machine has {} for the workers, and more than {} workers per core "
      "would stall it; start at most {}, or add --oversubscribe",
      options.nproc_per_node, base::counted(usable, "usable CPU"), base::kMaxProcessesPerCpu,
      base::kMaxProcessesPerCpu * usable));
}

RunContext make_run_context(const LaunchOptions& options) {
  RunContext context;
  context.master_addr = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  const int default_port = options.c10d ? kC10dPort : kStaticPort;
  context.master_port = options.master_port.value_or(options.nnodes.max > 1 ? default_port : 0);
  context.job_id = base::random_id();
  context.run_id = options.standalone ? context.job_id : options.run_id;
  context.program = (options.module ? "-m " : "") + shell_quoted(without_secrets(options.program));
  context.started = std::time(nullptr);
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

Variables worker_variables(const LaunchOptions& options, const RunContext& context,
                           int local_rank) {
  Variables variables{
      {"RANK", std::to_string(context.ranks.base + local_rank)},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", std::to_string(context.ranks.world_size)},
      {"LOCAL_WORLD_SIZE", std::to_string(options.nproc_per_node)},
      {"GROUP_RANK", std::to_string(context.node)},
      {"GROUP_WORLD_SIZE", std::to_string(context.nodes)},
      {"ROLE_NAME", options.role},
      {"ROLE_RANK", std::to_string(context.ranks.role_base + local_rank)},
      {"ROLE_WORLD_SIZE", std::to_string(context.ranks.role_world_size)},
      {"MASTER_ADDR", context.master_addr},
      {"MASTER_PORT", std::to_string(context.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(context.restart_count)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)},
      {"TORCHELASTIC_RUN_ID", context.run_id},
      {"SYNCBN_JOB_ID", context.job_id},
      {"SYNCBN_JOB_START", std::to_string(context.started)},
      {"SYNCBN_GPU_PER_WORKER", options.gpu_per_worker ? "1" : "0"},
      {"SYNCBN_ATTEMPT", std::to_string(context.attempt)},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", options.signals_to_handle},
      {"TORCHELASTIC_USE_AGENT_STORE", context.agent_store ? "True" : "False"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING",
       base::env("TORCH_NCCL_ASYNC_ERROR_HANDLING").value_or("1")},
  };
  if (options.virtual_local_rank) {
    variables["LOCAL_RANK"] = "0";
    variables["CUDA_VISIBLE_DEVICES"] = base::visible_gpu(local_rank);
  }
  if (!context.omp_num_threads.empty()) {
    const int threads = context.omp_num_threads.at(static_cast<size_t>(local_rank));
    variables["OMP_NUM_THREADS"] = std::to_string(threads);
  }
  return variables;
}

}  // namespace syncbn::launch
