#pragma once

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <chrono>

namespace syncbn::dist::detail {

/// As given, or a year: what is said to be endless overflows in deadlines.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  return std::min(timeout, kLongest);
}

/// The same of what a user gave. @throws base::UserError with its name unless it is above zero.
inline std::chrono::milliseconds checked(std::chrono::milliseconds timeout, const char* name) {
  if (timeout.count() > 0) return bounded(timeout);
  throw base::UserError(fmt::format("{} must be above zero, got {} ms", name, timeout.count()));
}

}  // namespace syncbn::dist::detail
