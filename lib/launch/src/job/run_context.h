#pragma once

#include <syncbn/launch/options.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/json_messages.h"
#include "job/torchrun_protocol.h"
#include "machine/topology.h"

namespace syncbn::launch {

/// What the leader assigns to a node for one attempt.
struct Assignment {
  std::string master_addr;
  int master_port = 0;
  std::string job_id;        ///< unique to this run; the same on all nodes and in all attempts
  bool agent_store = false;  ///< the launcher of node 0 holds the store, not rank 0
  int attempt = 0;
  int restart_count = 0;  ///< excludes attempts that start because a node joined or left
  ShownText reason = {};  ///< why another attempt starts; empty: it is the first
  int node = 0;
  int nodes = 1;
  AssignedRanks ranks;
};

/// What all workers of this node share during one attempt.
struct RunContext : Assignment {
  std::string run_id = "none";
  std::string program;               ///< with its arguments, as in a shell
  int64_t started = 0;               ///< when the launcher was, in seconds since 1970
  std::vector<Cpus> cpus;            ///< by local rank; empty: workers are not bound
  std::vector<int> omp_num_threads;  ///< by local rank; empty: OMP_NUM_THREADS stays as it is
};

/// Until the rendezvous, node, nodes and ranks are guesses: as if every node had as many workers as
/// this one. @throws base::UserError as cpus_of_workers() does.
RunContext make_run_context(const LaunchOptions& options);

/// RunContext::cpus. @throws base::UserError if there are too few CPUs for the binding, or for so
/// many workers without --oversubscribe.
std::vector<Cpus> cpus_of_workers(const LaunchOptions& options);

using Variables = std::map<std::string, std::string>;

/// The variables that a worker gets in addition to the launcher's environment; torchrun's names.
Variables worker_variables(const LaunchOptions& options, const RunContext& context, int local_rank);

}  // namespace syncbn::launch
