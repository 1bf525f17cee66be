#pragma once

#include <syncbn/launch/options.h>

#include <cstddef>
#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

/// The commands with which a head starts its nodes, and the jobs that it sends them.
class HeadPlan {
 public:
  /// Resolves the hosts' names, which is slow if a name server does not answer.
  explicit HeadPlan(const LaunchOptions& options);

  /// Whether the node's launcher starts without ssh.
  bool is_here(size_t node) const { return is_here_[node]; }
  /// The launcher's path on the hosts.
  std::string launcher() const;
  /// The argv that starts the node's launcher.
  std::vector<std::string> start_words(size_t node) const;
  /// The node's command line, sent as part of its job.
  std::vector<std::string> node_words(size_t node) const;
  /// The variables that the node gets from this environment. A local launcher inherits all.
  Variables environment(size_t node) const { return is_here(node) ? Variables{} : exported_; }

  /// The plan as shell commands, for --dry_run.
  std::string render() const;

 private:
  const std::vector<Host>& hosts() const { return options_.head.hosts; }
  std::string master_addr() const;

  const LaunchOptions& options_;
  const Variables exported_;
  std::vector<bool> is_here_;
};

}  // namespace syncbn::launch
