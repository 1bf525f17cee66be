#pragma once

#include <optional>
#include <string>
#include <vector>

#include "job/worker_state.h"

namespace syncbn::launch {

/// The rank that has not come to a call of lib/dist in which most others wait; if those that are
/// waited for all wait themselves, as in collectives of two groups in different orders, one of
/// them. Empty if nobody waits, or all have come.
/// @param workers that run, of all nodes.
/// @param min_wait in s: shorter waits do not count, as they may have begun after what is judged.
std::optional<Culprit> culprit_by_calls(const std::vector<WorkerState>& workers, double min_wait);

}  // namespace syncbn::launch
