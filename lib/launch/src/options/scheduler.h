#pragma once

#include <optional>
#include <string>

namespace syncbn::launch {

/// What a scheduler's environment says of this launcher's place among several.
struct SchedulerPlace {
  std::string source;  ///< the scheduler, for messages: "SLURM"
  int nodes = 1;
  int node_rank = 0;
  std::string master_addr;  ///< empty: it does not say
  /// The same for all nodes of a job, apart from other jobs' as far as can be; 0: it does not say.
  int master_port = 0;
  std::string run_id;  ///< tells this job from all others; empty: it does not say
};

/// Inside a step of SLURM (`srun --ntasks-per-node=1 syncbn-launch …`), or under Open MPI's
/// `mpirun --map-by ppr:1:node`, of more than one node. In SLURM's batch script, outside a step,
/// there is one launcher only, and nothing is returned.
/// @throws base::UserError when there are several launchers on a node.
std::optional<SchedulerPlace> place_from_scheduler();

/// The number of this pod in an indexed job of Kubernetes.
std::optional<int> kubernetes_index();

/// The first name in SLURM's list of nodes: "gpu[03-05,9],login" gives "gpu03".
std::string first_slurm_node(const std::string& list);

}  // namespace syncbn::launch
