#pragma once

#include <syncbn/launch/options.h>

#include <string>

#include "job/run_context.h"
#include "workers/program.h"

namespace syncbn::launch {

/// The text of --dry_run: shell commands that start this node's workers. A comment about the node,
/// an export of the variables that all workers share, then a comment and a command for each worker.
std::string render_plan(const LaunchOptions& options, const RunContext& context,
                        const Command& command);

}  // namespace syncbn::launch
