#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profile/intervals.h"

namespace syncbn::train {

/// The time of a layer, or of an operator without parameters, over all steps. In nanoseconds.
struct LayerTime {
  std::string name;
  int64_t forward = 0;   ///< without exchanges
  int64_t backward = 0;  ///< without exchanges
  int64_t exchange = 0;  ///< of its statistics, in forward and backward
};

/// The time of exchanges of one kind over all steps, in nanoseconds.
struct ExchangeTime {
  int64_t total = 0;
  int64_t exposed = 0;  ///< in which the rank had nothing to compute
};

/// @param exchanges of one kind
/// @param blocked when the rank waited for an exchange of any kind, which hides no other meanwhile
ExchangeTime exchange_time(Intervals exchanges, Intervals blocked);

/// What the summary of a profile needs from a rank.
struct RankProfile {
  int64_t first_step = 0;  ///< from 1
  int64_t steps = 0;
  int64_t step_time = 0;  ///< of all steps, in nanoseconds
  std::vector<LayerTime> layers = {};
  ExchangeTime gradients = {};
  ExchangeTime statistics = {};
  std::string failure = {};  ///< why the rank could not write its trace; empty if it did
};

std::string to_bytes(const RankProfile& profile);
RankProfile rank_profile_of(const std::string& bytes);

}  // namespace syncbn::train
