#pragma once

#include <string>

namespace syncbn::base {

/// "SIGKILL"; "signal 40" for a signal without a name. Not sigabbrev_np(), which needs glibc 2.32.
/// Thread-safe.
std::string signal_name(int signal);

}  // namespace syncbn::base
