#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/json_messages.h"
#include "job/worker_state.h"

namespace syncbn::launch {

/// The rank for which the others wait.
struct Culprit {
  int rank = 0;
  std::string why;      ///< follows "it "
  bool is_sure = true;  ///< by its own records or process state, not only by a difference
};

/// Which of the running workers of all nodes holds up the others; empty if nothing distinguishes
/// them. Looks in this order for a stopped process; for one that has not made a call of lib/dist in
/// which others wait; by their records over the agent channel, for one that does not wait in a
/// collective, waits in an earlier one or has made fewer steps than others at the same time; for
/// one whose main thread is at another place than those of all others.
std::optional<Culprit> find_culprit(const std::vector<WorkerState>& workers, double min_wait = 0);

/// What to say and do about workers that make no progress.
struct Hang {
  int rank = -1;            ///< the worker to end; -1: none
  ShownText text;           ///< one line
  bool stops_time = false;  ///< --hang_timeout begins anew, because of a debugger
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Hang, rank, text, stops_time)

/// @param workers of all nodes, of which some have made no progress for `seconds`.
/// @param ends whether to end the culprit. Otherwise it is only named, and only if it is sure.
std::optional<Hang> judge_hang(const std::vector<WorkerState>& workers, double seconds, bool ends);

}  // namespace syncbn::launch
