#pragma once

namespace syncbn::launch {

/// syncbn-launch: reads the command line, runs the workers and returns the exit code
/// (docs/errors.md). For a program's main() only: it makes the process a subreaper and handles its
/// signals. Single-threaded.
/// @throws base::Error for an error before any worker has started.
int launch(int argc, const char* const* argv);

}  // namespace syncbn::launch
