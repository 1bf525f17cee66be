#pragma once

#include <stdexcept>

namespace syncbn::dist::detail {

/// A call has taken longer than its timeout.
struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace syncbn::dist::detail
