#pragma once

#include <syncbn/launch/options.h>

#include <functional>
#include <optional>
#include <string>

#include "common/head_link.h"
#include "nodes/master_port.h"
#include "ssh/node_job.h"
#include "ssh/node_message.h"

namespace syncbn::launch {

/// A node's launcher that was started by a head: receives the job from the head, reports whether it
/// can run it, and how it ended.
class SshNode {
 public:
  /// Takes stdin; workers get an empty one.
  SshNode();

  /// Waits for the job, prepares this process, reports that it is ready, and waits until all nodes
  /// are. Empty if this node cannot run the job, after it has told the head why.
  /// @param check throws a base::Error if this machine cannot do what the options ask for.
  /// @throws base::UnavailableError when the head is gone.
  std::optional<LaunchOptions> prepare(const std::function<void(const LaunchOptions&)>& check);
  /// The code to exit with if that was empty.
  int exit_code() const { return exit_code_; }

  HeadLink& head() { return head_; }

  /// Sends the last message to the head. @param report from json_report().
  std::string ended(int exit_code, const std::string& report) const;

 private:
  LaunchOptions get_ready(const NodeJob& job);
  void refuse(int exit_code, const std::string& what);
  void say(const NodeMessage& message) const;

  HeadLink head_;
  std::string mark_;
  int exit_code_ = 0;
  std::optional<base::HeldPort> port_;  ///< on node 0
};

}  // namespace syncbn::launch
