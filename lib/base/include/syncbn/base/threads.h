#pragma once

namespace syncbn::base {

/// Starts `count` threads at the same time and ends them. To be called before libgomp and libtorch,
/// which hang or abort if they cannot start a thread.
/// @throws UnavailableError naming the limit that was reached.
void check_threads(int count);

}  // namespace syncbn::base
