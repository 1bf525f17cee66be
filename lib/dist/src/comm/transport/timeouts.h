#pragma once

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace syncbn::dist::detail {

/// A call has taken longer than its timeout.
struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// c10d's options of a call, with this timeout.
template <class Options>
Options with_timeout(Timeout timeout) {
  Options options;
  if (timeout) options.timeout = *timeout;
  return options;
}

/// The time until `deadline`, rounded up, and at least one millisecond.
inline std::chrono::milliseconds time_left(std::chrono::steady_clock::time_point deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
  return std::max(left, milliseconds(1));
}

/// At most a year: longer timeouts overflow when they are added to a time.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365));
}

/// bounded() for a user's timeout. @throws base::UserError with `name` unless it is above zero.
inline std::chrono::milliseconds checked(std::chrono::milliseconds timeout, const char* name) {
  if (timeout.count() > 0) return bounded(timeout);
  throw base::UserError(fmt::format("{} must be above zero, got {} ms", name, timeout.count()));
}
inline Timeout checked(Timeout timeout, const char* name) {
  return timeout ? Timeout(checked(*timeout, name)) : timeout;
}

}  // namespace syncbn::dist::detail
