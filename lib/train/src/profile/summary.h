#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "profile/rank_profile.h"

namespace syncbn::train {

/// The results of a profile, for the terminal and the report: the slowest layers, the exchanges and
/// how much of them is hidden. Times are means per step and rank, in seconds.
/// @param profiles of all ranks
nlohmann::ordered_json summary_of(const std::vector<RankProfile>& profiles);

/// A summary as lines of text.
std::vector<std::string> table_of(const nlohmann::ordered_json& summary);

}  // namespace syncbn::train
