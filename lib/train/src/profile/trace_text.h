#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "profile/recorder.h"

namespace syncbn::train {

/// A rank's events of a trace in Chrome's format, separated by commas: a process "rank 0 (host)"
/// whose threads are the tracks. Times in the text are in microseconds.
/// @param start the trace's time 0, by the rank's clock, in nanoseconds
std::string trace_text(int64_t rank, const std::string& host, const std::vector<Track>& tracks,
                       int64_t start);

}  // namespace syncbn::train
