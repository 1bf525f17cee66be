#pragma once

#include <syncbn/launch/options.h>

#include <map>
#include <string>
#include <vector>

#include "job/torchrun_protocol.h"
#include "machine/topology.h"

namespace syncbn::launch {

/// What all workers of this node share in one attempt.
struct RunContext {
  std::string master_addr;
  int master_port = 0;
  std::string run_id = "none";
  std::string job_id;        ///< unique to this run; the same on all nodes and in all attempts
  bool agent_store = false;  ///< the launcher of node 0 holds the store, not rank 0
  int attempt = 0;
  int restart_count = 0;   ///< without the attempts that begin because a node came or left
  std::vector<Cpus> cpus;  ///< by local rank; empty: workers are not bound
  std::vector<int> omp_num_threads;  ///< by local rank; empty: OMP_NUM_THREADS stays as it is
  int node = 0;
  int nodes = 1;
  AssignedRanks ranks;
};

/// Node, nodes and ranks are guesses until this node has met the others: as if all had as many
/// workers as this one.
/// @throws base::UserError if this machine cannot do what the options ask for.
RunContext make_run_context(const LaunchOptions& options);

/// RunContext::cpus. @throws base::UserError if there are too few CPUs for the binding, or for so
/// many workers without --oversubscribe.
std::vector<Cpus> cpus_of_workers(const LaunchOptions& options);

using Variables = std::map<std::string, std::string>;

/// What a worker gets on top of the launcher's own environment, under torchrun's names.
Variables worker_variables(const LaunchOptions& options, const RunContext& context, int local_rank);

/// The launcher's environment with `variables` over it, as execve takes it.
std::vector<std::string> merge_environment(const Variables& variables);

}  // namespace syncbn::launch
