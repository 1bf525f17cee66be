#pragma once

#include <signal.h>

#include <initializer_list>

namespace syncbn::train {

/// Signals that batch systems send before they end a job. bin/train blocks them until the program
/// that it starts has handlers. This header must not include libtorch's.
inline constexpr std::initializer_list<int> kEarlySignals = {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};

}  // namespace syncbn::train
