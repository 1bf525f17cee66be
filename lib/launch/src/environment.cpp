#include "environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <string_view>

namespace syncbn::launch {

int global_rank(const LaunchOptions& options, int local_rank) {
  return options.node_rank * options.nproc_per_node + local_rank;
}

Variables worker_variables(const LaunchOptions& options, const RunFacts& facts, int local_rank) {
  const std::string rank = std::to_string(global_rank(options, local_rank));
  const std::string world_size = std::to_string(options.nnodes * options.nproc_per_node);
  Variables variables{
      {"RANK", rank},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", world_size},
      {"LOCAL_WORLD_SIZE", std::to_string(options.nproc_per_node)},
      {"GROUP_RANK", std::to_string(options.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(options.nnodes)},
      {"ROLE_NAME", options.role},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", world_size},
      {"MASTER_ADDR", facts.master_addr},
      {"MASTER_PORT", std::to_string(facts.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_RUN_ID", facts.run_id},
      // Rank 0 of the workers hosts the store on MASTER_PORT: the launcher needs none of its own.
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
  };
  if (facts.omp_num_threads > 0) {
    variables["OMP_NUM_THREADS"] = std::to_string(facts.omp_num_threads);
  }
  return variables;
}

std::vector<std::string> merge_environment(const Variables& variables) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (variables.count(std::string(text.substr(0, text.find('=')))) == 0)
      merged.emplace_back(text);
  }
  for (const auto& [name, value] : variables) merged.push_back(fmt::format("{}={}", name, value));
  return merged;
}

}  // namespace syncbn::launch
