#pragma once

#include <optional>
#include <vector>

#include "job/worker_state.h"

namespace syncbn::launch {

/// The rank that most others wait for in a call of lib/dist that it has not made. If all awaited
/// ranks wait themselves, as when two groups' collectives are called in different orders, one of
/// these ranks. Empty if no rank waits, or all have made the call.
/// @param workers the running workers of all nodes.
/// @param min_wait in s; ignores shorter waits, which may have begun after the stall in question.
std::optional<Culprit> culprit_by_calls(const std::vector<WorkerState>& workers, double min_wait);

}  // namespace syncbn::launch
