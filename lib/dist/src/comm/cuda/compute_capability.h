#pragma once

namespace syncbn::dist::detail {

/// Ten times the lowest compute capability that the kernels were built for: 80 for 8.0.
int lowest_compute_capability();

}  // namespace syncbn::dist::detail
