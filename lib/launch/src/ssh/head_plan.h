#pragma once

#include <syncbn/launch/options.h>

#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

/// How a head starts a node.
struct NodePlan {
  Host host;
  bool is_here = false;            ///< its launcher starts without ssh
  std::vector<std::string> start;  ///< the argv that starts its launcher
  std::vector<std::string> words;  ///< its command line, sent as part of its job

  /// The variables that it gets from `exported`. A local launcher inherits all.
  Variables environment(const Variables& exported) const {
    return is_here ? Variables() : exported;
  }
};

/// Resolves the hosts' names, which is slow if a name server does not answer.
std::vector<NodePlan> plan_nodes(const LaunchOptions& options);

/// The launcher's path on the hosts.
std::string launcher_on_hosts(const LaunchOptions& options);

/// The plan as shell commands, for --dry_run.
std::string render(const std::vector<NodePlan>& nodes, const Variables& exported);

}  // namespace syncbn::launch
