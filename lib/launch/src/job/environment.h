#pragma once

#include <syncbn/launch/options.h>

#include <map>
#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

using Variables = std::map<std::string, std::string>;

/// What a worker gets on top of the launcher's own environment, under torchrun's names.
Variables worker_variables(const LaunchOptions& options, const RunContext& context, int local_rank);

/// The launcher's environment with `variables` over it, as execve takes it.
std::vector<std::string> merge_environment(const Variables& variables);

}  // namespace syncbn::launch
