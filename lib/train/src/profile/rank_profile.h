#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profile/intervals.h"

namespace syncbn::train {

/// A collective. Times are by the rank's own clock.
struct Exchange {
  enum class Kind { kGradients, kStatistics, kOther };

  std::string name;
  Kind kind = Kind::kOther;
  std::string group;
  uint64_t sequence = 0;   ///< in the group; the same on all ranks
  Interval time;           ///< from the call until the result is there; on GPUs, of NCCL's kernels
  Intervals blocked = {};  ///< times in which the rank only waits for it
};

/// The time of a layer, or of an operator without parameters, over all steps. In nanoseconds.
struct LayerTime {
  std::string name;
  int64_t calls = 0;
  int64_t forward = 0;   ///< without exchanges
  int64_t backward = 0;  ///< without exchanges
  int64_t exchange = 0;  ///< of its statistics, in forward and backward
};

struct Phase {
  std::string name;  ///< "loader", "forward"
  Interval time;
};

/// What the summary of a profile needs from a rank.
struct RankProfile {
  int64_t rank = 0;
  std::string host;
  int64_t first_step = 0;  ///< from 1
  std::vector<Interval> steps = {};
  std::vector<Phase> phases = {};
  std::vector<Exchange> exchanges = {};
  std::vector<LayerTime> layers = {};
};

std::string to_bytes(const RankProfile& profile);
RankProfile rank_profile_of(const std::string& bytes);

}  // namespace syncbn::train
