#pragma once

namespace syncbn::launch {

/// syncbn-launch: reads the command line, runs the workers and returns the exit code
/// (docs/errors.md). Only for a program's main(): makes the process a subreaper and blocks signals.
/// Single-threaded.
/// @throws base::Error for an error before any worker has started.
int launch(int argc, const char* const* argv);

}  // namespace syncbn::launch
