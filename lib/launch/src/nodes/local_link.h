#pragma once

#include <syncbn/base/held_port.h>
#include <syncbn/launch/options.h>

#include <optional>
#include <string>

#include "job/job_leader.h"
#include "job/run_context.h"
#include "nodes/node_link.h"

namespace syncbn::launch {

/// The link to a leader in this object. A job's only node uses it as it is, because its rank 0
/// holds the store; node 0 of several uses the Coordinator.
class LocalLink : public NodeLink {
 public:
  /// @param port of rank 0 in the first attempt.
  LocalLink(const LaunchOptions& options, const RunContext& context, base::HeldPort port);

  int fd() const override { return -1; }
  Clock::time_point due() const override { return leader_.due(); }
  void handle() override;
  void send(const FromNode& message) override;
  bool leads() const override { return true; }
  std::optional<FlightFile> take_records() override { return leader_.take_records(); }

 protected:
  LocalLink(const LaunchOptions& options, const RunContext& context);
  /// Registers this node. @param host "": the only one
  void join(const std::string& host);
  void carry_out_commands();
  /// Prepares the store, and adds its port.
  virtual void prepare(Start& start);
  /// Sends a message to another node, or to all.
  virtual void send_to(int /*node*/, ToNode& /*message*/) {}

  const LaunchOptions& options_;
  const int master_port_;
  std::optional<base::HeldPort> port_;  ///< of rank 0's store in this attempt
  JobLeader leader_;

 private:
  const std::string master_addr_;
  const std::string job_id_;
  int own_ = 0;  ///< the rank of this node
};

}  // namespace syncbn::launch
