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

/// The launcher of one node, as a head has started it: learns from the head what to run, and tells
/// it whether that can be, and how it ended.
class SshNode {
 public:
  /// Takes stdin over; the workers' is empty.
  SshNode();

  /// Waits for the job, makes this process ready for it, says so, and waits for all other nodes to
  /// be ready, too. Nothing where it cannot be: the head has been told why.
  /// @param check throws a base::Error where this machine cannot do what the options ask for.
  /// @throws base::UnavailableError when the head is gone.
  std::optional<LaunchOptions> prepare(const std::function<void(const LaunchOptions&)>& check);
  /// What that "nothing" leaves to do: exit with this.
  int exit_code() const { return exit_code_; }

  HeadLink& head() { return head_; }

  /// The last line to the head. @param report of json_report().
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
