#pragma once

#include <syncbn/launch/options.h>

#include <cstddef>
#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

/// What a head starts on each of its hosts, the nodes, and what it tells the launchers there.
class HeadPlan {
 public:
  /// Asks which hosts are this machine; where a name server does not answer, that takes long.
  explicit HeadPlan(const LaunchOptions& options);

  /// Whether the node's launcher is started without ssh.
  bool is_here(size_t node) const { return is_here_[node]; }
  /// Where the launcher is on the hosts.
  std::string launcher() const;
  /// argv that starts it.
  std::vector<std::string> start_words(size_t node) const;
  /// What it would be told on a command line.
  std::vector<std::string> node_words(size_t node) const;
  /// What it is given of the environment.
  Variables environment(size_t node) const;

  /// All that in lines for a person.
  std::string render() const;

 private:
  const std::vector<Host>& hosts() const { return options_.head.hosts; }
  std::string master_addr() const;

  const LaunchOptions& options_;
  const Variables exported_;
  std::vector<bool> is_here_;
};

}  // namespace syncbn::launch
