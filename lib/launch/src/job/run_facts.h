#pragma once

#include <syncbn/launch/options.h>

#include <string>
#include <vector>

#include "job/assigned_ranks.h"
#include "machine/cpus.h"

namespace syncbn::launch {

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

/// As far as they are known before this node has met the others.
/// @throws base::UserError where this machine cannot do what the options ask for.
RunFacts gather_facts(const LaunchOptions& options);

/// RunFacts::cpus. @throws base::UserError when there are too few for the binding, or for so many
/// workers without --oversubscribe.
std::vector<Cpus> cpus_of_workers(const LaunchOptions& options);

}  // namespace syncbn::launch
