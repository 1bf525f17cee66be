#pragma once

#include <algorithm>
#include <chrono>

namespace syncbn::dist::detail {

/// As given, or a year: what is said to be endless overflows in deadlines.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  return std::min(timeout, kLongest);
}

}  // namespace syncbn::dist::detail
