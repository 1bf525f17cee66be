#pragma once

namespace syncbn::base {

/// Starts `count` threads at the same time and ends them. Call it before libgomp and libtorch start
/// theirs: they hang or abort if they cannot.
/// @throws UnavailableError naming the limit that was reached.
void check_threads(int count);

}  // namespace syncbn::base
