#pragma once

namespace syncbn::launch {

/// The whole of syncbn-launch: reads the command line, runs the workers to their end and returns
/// the exit code (docs/errors.md). Single-threaded; becomes a subreaper and takes over the
/// process's signals, so it is for a program's main() only.
/// @throws base::Error for what is wrong before any worker has started.
int launch(int argc, const char* const* argv);

}  // namespace syncbn::launch
