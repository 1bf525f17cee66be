#pragma once

namespace syncbn::base {

/// Starts so many threads at the same time and ends them: libgomp hangs and libtorch aborts where
/// a thread of theirs cannot start.
/// @throws UnavailableError naming the limit that was reached.
void check_threads(int count);

}  // namespace syncbn::base
