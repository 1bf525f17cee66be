#pragma once

#include <string>

namespace syncbn::base {

/// "SIGKILL"; "signal 40" for one without a name. sigabbrev_np() needs glibc 2.32. Thread-safe.
std::string signal_name(int signal);

}  // namespace syncbn::base
