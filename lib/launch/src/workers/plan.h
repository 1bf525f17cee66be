#pragma once

#include <syncbn/launch/options.h>

#include <string>

#include "job/run_context.h"
#include "workers/program.h"

namespace syncbn::launch {

/// What would be started on this node, as lines for a shell that does the same by hand: a comment
/// about the node, an export of what all workers share, then for each worker a comment and its
/// command.
std::string render_plan(const LaunchOptions& options, const RunContext& context,
                        const Command& command);

}  // namespace syncbn::launch
