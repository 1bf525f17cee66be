#pragma once

#include "output.h"
#include "signals.h"

namespace syncbn::launch {

/// Waits at the end of a run until our own reader has taken all of the output. Returns the
/// launcher's exit code: the run's own, that of a signal to end, 75 when output was lost.
/// @param hurried the run had to end, by a signal or for another node: whoever reads our output
///   (`less`, a stopped terminal) has a second to take the rest.
int wait_for_reader(Output& output, Signals& signals, int exit_code, bool hurried);

}  // namespace syncbn::launch
