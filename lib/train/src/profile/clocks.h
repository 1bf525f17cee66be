#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace syncbn::train {

/// How a clock differs from rank 0's, in nanoseconds.
struct ClockOffset {
  int64_t offset = 0;  ///< its time minus that of rank 0's
  int64_t error = 0;   ///< the true difference is at most this far from `offset`
};

/// A message to another clock and back: when it left and came back by this clock, and the other
/// clock's time in between.
struct ClockReading {
  int64_t sent = 0;
  int64_t other = 0;
  int64_t received = 0;
};

/// The other clock showed `other` between `sent` and `received`, so a reading bounds the offset
/// from both sides, as in NTP. The error is at most half of the shortest round trip.
/// @param readings at least one
ClockOffset offset_of(const std::vector<ClockReading>& readings);

/// The offset of each rank's clock. Every rank calls it. Ranks of one host share a clock.
/// @param host a text that only ranks of this host pass
/// @param now the clock
std::vector<ClockOffset> clock_offsets(const std::string& host,
                                       const std::function<int64_t()>& now);

}  // namespace syncbn::train
