#pragma once

#include <string>

#include "common/signals.h"
#include "output/output.h"

namespace syncbn::launch {

/// Writes how the run ended to the file of --report; none where `file` is empty. When it cannot be
/// written, it says so and returns: the run's own end matters more.
void write_report(Output& output, const std::string& file, const std::string& json);

/// Waits at the end of a run until our own reader has taken all of the output. Returns the
/// launcher's exit code: the run's own, that of a signal to end, 75 when output was lost.
/// @param hurried the run had to end, by a signal or for another node: whoever reads our output
///   (`less`, a stopped terminal) has a second to take the rest.
int wait_for_reader(Output& output, Signals& signals, int exit_code, bool hurried);

}  // namespace syncbn::launch
