#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "profile/clocks.h"
#include "profile/rank_profile.h"

namespace syncbn::train {

/// The results of a profile, for the terminal and the report: the slowest layers, the exchanges and
/// how much of them is hidden, which rank waits for which, and the straggler. Times are means per
/// step, in seconds.
///
/// In a collective, a rank waits for another from when it has nothing else to do until the last
/// rank has called it. Waits that the clocks' errors could explain do not count.
/// @param profiles by rank
/// @param clocks of the ranks
nlohmann::ordered_json summary_of(const std::vector<RankProfile>& profiles,
                                  const std::vector<ClockOffset>& clocks);

/// A summary as lines of text.
std::vector<std::string> table_of(const nlohmann::ordered_json& summary);

}  // namespace syncbn::train
