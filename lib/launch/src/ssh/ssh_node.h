#pragma once

#include <syncbn/launch/options.h>

#include <functional>
#include <optional>
#include <string>

#include "common/head_link.h"
#include "nodes/master_port.h"
#include "ssh/node_protocol.h"

namespace syncbn::launch {

/// The launcher of one node, started by a head: receives the job from the head, and reports whether
/// it can run and how it ended.
class SshNode {
 public:
  /// Takes over stdin; workers get /dev/null.
  SshNode();

  /// Waits for the job, prepares this process for it, and waits until all nodes are ready. If the
  /// job cannot run here, tells the head why and returns nothing.
  /// @param check throws a base::Error if this machine cannot run a job with these options.
  /// @throws base::UnavailableError when the head is gone.
  std::optional<LaunchOptions> prepare(const std::function<void(const LaunchOptions&)>& check);
  /// The exit code after prepare() returned nothing.
  int exit_code() const { return exit_code_; }

  HeadLink& head() { return head_; }

  /// The last line to the head. @param report from json_report().
  std::string ended(int exit_code, const std::string& report) const;

 private:
  LaunchOptions get_ready(const NodeJob& job);
  void say(const NodeMessage& message) const;

  HeadLink head_;
  std::string mark_;
  int exit_code_ = 0;
  std::optional<base::HeldPort> port_;  ///< on node 0
};

}  // namespace syncbn::launch
