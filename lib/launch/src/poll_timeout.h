#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace syncbn::launch {

/// For poll(): the time until `when`, rounded up, at most a minute.
inline int milliseconds_until(std::chrono::steady_clock::time_point when) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(when - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
}

}  // namespace syncbn::launch
