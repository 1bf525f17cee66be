#pragma once

#include <signal.h>

#include <initializer_list>

namespace syncbn::train {

/// What batch systems send ahead of the end. bin/train blocks them until the program that it starts
/// has handlers. Includes nothing of libtorch.
inline constexpr std::initializer_list<int> kEarlySignals = {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};

}  // namespace syncbn::train
