#pragma once

#include <syncbn/launch/options.h>

#include <string>

namespace syncbn::launch {

/// --prefix for one worker, with ${time} left in it.
std::string line_prefix(const LaunchOptions& options, int rank, int local_rank);

}  // namespace syncbn::launch
