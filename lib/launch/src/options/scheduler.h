#pragma once

#include <optional>
#include <string>

namespace syncbn::launch {

/// This launcher's rank among the launchers of a job, from a scheduler's environment.
struct SchedulerPlace {
  std::string source;  ///< the scheduler, for messages: "SLURM"
  int nodes = 1;
  int node_rank = 0;
  std::string master_addr = {};  ///< empty: unknown
  int master_port = 0;      ///< the same on all nodes, and rarely that of another job; 0: unknown
  std::string run_id = {};  ///< unique to the job; empty: unknown
};

/// For a step of SLURM (`srun --ntasks-per-node=1 syncbn-launch …`) or a run of Open MPI
/// (`mpirun --map-by ppr:1:node`) on more than one node; otherwise empty. A SLURM batch script runs
/// outside of a step, and starts one launcher only.
/// @throws base::UserError if there are several launchers on a node.
std::optional<SchedulerPlace> place_from_scheduler();

/// The number of this pod in an indexed job of Kubernetes.
std::optional<int> kubernetes_index();

/// The first name in SLURM's list of nodes: "gpu[03-05,9],login" gives "gpu03".
std::string first_slurm_node(const std::string& list);

}  // namespace syncbn::launch
