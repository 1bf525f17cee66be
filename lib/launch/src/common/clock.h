#pragma once

#include <chrono>

namespace syncbn::launch {

/// Of all deadlines and intervals; setting the machine's time does not move it.
using Clock = std::chrono::steady_clock;

}  // namespace syncbn::launch
