#pragma once

#include <syncbn/launch/options.h>

#include <map>
#include <string>
#include <vector>

namespace syncbn::launch {

using Variables = std::map<std::string, std::string>;

/// What all workers of a run share.
struct RunFacts {
  std::string master_addr;
  int master_port = 0;
  std::string run_id = "none";
  int restart_count = 0;
  int omp_num_threads = 0;  ///< 0: the environment has OMP_NUM_THREADS already
};

/// The global rank of a worker of this node.
int global_rank(const LaunchOptions& options, int local_rank);

/// The variables that a worker finds on top of the launcher's own environment: torchrun's names.
Variables worker_variables(const LaunchOptions& options, const RunFacts& facts, int local_rank);

/// --prefix for one worker, with ${time} left in it.
std::string line_prefix(const LaunchOptions& options, int local_rank);

/// The launcher's environment with `variables` over it, as execve takes it.
std::vector<std::string> merge_environment(const Variables& variables);

}  // namespace syncbn::launch
