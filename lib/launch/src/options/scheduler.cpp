#include "options/scheduler.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <limits>

namespace syncbn::launch {
namespace {

// Jobs that share a node most likely differ in the last digits of their ids. SLURM numbers the
// steps of a job (`srun … & srun … & wait`) from 0.
constexpr int kFirstPort = 29500;
constexpr int64_t kPorts = 2000;
constexpr int64_t kPortsBetweenSteps = 101;

std::optional<int> number(const char* name) {
  const auto value = base::env_int(name, 0, std::numeric_limits<int>::max());
  return value ? std::optional<int>(static_cast<int>(*value)) : std::nullopt;
}

// A SLURM id is an unsigned 32-bit number: a federation of clusters uses the upper bits.
int64_t slurm_id(const char* name) {
  return base::env_int(name, 0, std::numeric_limits<uint32_t>::max()).value_or(0);
}

void check_one_per_node(const std::string& source, int launchers, int nodes,
                        const std::string& option) {
  if (launchers == nodes) return;
  throw base::UserError(fmt::format(
      "{} starts {} on {}; syncbn-launch starts the workers of a node "
      "itself: use {}, or --standalone for launchers that know nothing of each other",
      source, base::counted(launchers, "launcher"), base::counted(nodes, "node"), option));
}

std::optional<SchedulerPlace> place_from_slurm() {
  const auto nodes = number("SLURM_STEP_NUM_NODES");
  const auto node = number("SLURM_NODEID");
  const auto list = base::env("SLURM_STEP_NODELIST");
  if (!nodes || !node || !list || *nodes < 2) return std::nullopt;
  check_one_per_node("SLURM", number("SLURM_STEP_NUM_TASKS").value_or(*nodes), *nodes,
                     "srun --ntasks-per-node=1");
  const int64_t job = slurm_id("SLURM_JOB_ID");
  const int64_t step = slurm_id("SLURM_STEP_ID");
  const int64_t port = kFirstPort + (job + kPortsBetweenSteps * step) % kPorts;
  return SchedulerPlace{.source = "SLURM",
                        .nodes = *nodes,
                        .node_rank = *node,
                        .master_addr = first_slurm_node(*list),
                        .master_port = static_cast<int>(port),
                        .run_id = fmt::format("{}.{}", job, step)};
}

std::optional<SchedulerPlace> place_from_open_mpi() {
  const auto size = number("OMPI_COMM_WORLD_SIZE");
  const auto rank = number("OMPI_COMM_WORLD_RANK");
  if (!size || !rank || *size < 2) return std::nullopt;
  const int here = number("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(1);
  check_one_per_node("mpirun", here, 1, "mpirun --map-by ppr:1:node");
  return SchedulerPlace{.source = "Open MPI", .nodes = *size, .node_rank = *rank};
}

}  // namespace

std::optional<SchedulerPlace> place_from_scheduler() {
  if (auto place = place_from_slurm()) return place;
  return place_from_open_mpi();
}

std::optional<int> kubernetes_index() {
  return number("JOB_COMPLETION_INDEX");
}

std::string first_slurm_node(const std::string& list) {
  const size_t bracket = list.find('[');
  const size_t comma = list.find(',');
  if (comma < bracket) return list.substr(0, comma);
  if (bracket == std::string::npos) return list;
  const size_t first_end = list.find_first_of("-,]", bracket);
  const size_t close = list.find(']', bracket);
  if (first_end == std::string::npos || close == std::string::npos) return list;
  const size_t next = std::min(list.find(',', close), list.size());
  return list.substr(0, bracket) + list.substr(bracket + 1, first_end - bracket - 1) +
         list.substr(close + 1, next - close - 1);
}

}  // namespace syncbn::launch
