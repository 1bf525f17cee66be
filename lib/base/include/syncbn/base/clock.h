#pragma once

#include <chrono>
#include <cstdint>

namespace syncbn::base {

/// CLOCK_MONOTONIC, which all processes of a host share, in nanoseconds.
inline uint64_t monotonic_ns() {
  const std::chrono::nanoseconds now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(now.count());
}

/// CLOCK_REALTIME, in nanoseconds since 1970.
inline int64_t unix_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace syncbn::base
