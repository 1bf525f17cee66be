#pragma once

#include <syncbn/launch/options.h>

#include <map>
#include <string>
#include <vector>

#include "machine/cpus.h"
#include "nodes/assigned_ranks.h"

namespace syncbn::launch {

using Variables = std::map<std::string, std::string>;

/// What all workers of this node share in one attempt.
struct RunFacts {
  std::string master_addr;
  int master_port = 0;
  std::string run_id = "none";
  std::string job_id;        ///< the same on all nodes, in all attempts, and in no other run
  bool agent_store = false;  ///< the launcher of node 0 holds the store, not rank 0
  int attempt = 0;
  int restart_count = 0;             ///< attempts because of other nodes do not count
  std::vector<Cpus> cpus;            ///< by local rank; empty: workers are not bound
  std::vector<int> omp_num_threads;  ///< by local rank; empty: OMP_NUM_THREADS stays as it is
  // The node among the nodes, and its workers among all workers.
  int node = 0;
  int nodes = 1;
  AssignedRanks ranks;
};

/// The variables that a worker finds on top of the launcher's own environment: torchrun's names.
Variables worker_variables(const LaunchOptions& options, const RunFacts& facts, int local_rank);

/// --prefix for one worker, with ${time} left in it.
std::string line_prefix(const LaunchOptions& options, int rank, int local_rank);

/// The launcher's environment with `variables` over it, as execve takes it.
std::vector<std::string> merge_environment(const Variables& variables);

}  // namespace syncbn::launch
