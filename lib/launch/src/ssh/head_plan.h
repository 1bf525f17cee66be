#pragma once

#include <syncbn/launch/options.h>

#include <cstddef>
#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

/// What a head starts on each of its hosts (the nodes), and the options of the launchers there.
class HeadPlan {
 public:
  /// Resolves which hosts are this machine: slow if a name server does not answer.
  explicit HeadPlan(const LaunchOptions& options);

  /// Whether the node's launcher starts without ssh.
  bool is_here(size_t node) const { return is_here_[node]; }
  /// The launcher's path on the hosts.
  std::string launcher() const;
  /// The argv that starts the node's launcher.
  std::vector<std::string> start_words(size_t node) const;
  /// Its options, as on a command line.
  std::vector<std::string> node_words(size_t node) const;
  /// The environment variables that it gets.
  Variables environment(size_t node) const;

  /// The plan as text for the user.
  std::string render() const;

 private:
  const std::vector<Host>& hosts() const { return options_.head.hosts; }
  std::string master_addr() const;

  const LaunchOptions& options_;
  const Variables exported_;
  std::vector<bool> is_here_;
};

}  // namespace syncbn::launch
