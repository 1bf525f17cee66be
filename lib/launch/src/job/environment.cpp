#include "job/environment.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <unistd.h>

#include <string_view>

#include "machine/devices.h"

namespace syncbn::launch {

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
      {"SYNCBN_GPU_PER_WORKER", options.gpu_per_worker ? "1" : "0"},
      {"SYNCBN_ATTEMPT", std::to_string(context.attempt)},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", options.signals_to_handle},
      {"TORCHELASTIC_USE_AGENT_STORE", context.agent_store ? "True" : "False"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING",
       base::env("TORCH_NCCL_ASYNC_ERROR_HANDLING").value_or("1")},
  };
  if (options.virtual_local_rank) {
    variables["LOCAL_RANK"] = "0";
    variables["CUDA_VISIBLE_DEVICES"] = visible_gpu(local_rank);
  }
  if (!context.omp_num_threads.empty()) {
    const int threads = context.omp_num_threads.at(static_cast<size_t>(local_rank));
    variables["OMP_NUM_THREADS"] = std::to_string(threads);
  }
  return variables;
}

std::vector<std::string> merge_environment(const Variables& variables) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string name(text.substr(0, text.find('=')));
    if (!variables.contains(name)) merged.emplace_back(text);
  }
  for (const auto& [name, value] : variables) merged.push_back(fmt::format("{}={}", name, value));
  return merged;
}

}  // namespace syncbn::launch
