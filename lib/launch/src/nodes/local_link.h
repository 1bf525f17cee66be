#pragma once

#include <syncbn/base/held_port.h>
#include <syncbn/launch/options.h>

#include "job/job_leader.h"
#include "job/run_context.h"
#include "nodes/node_link.h"

namespace syncbn::launch {

/// The link of a job's only node: the leader is in this object, and rank 0 holds the store.
class LocalLink : public NodeLink {
 public:
  /// @param port of rank 0 in the first attempt.
  LocalLink(const LaunchOptions& options, const RunContext& context, base::HeldPort port);

  int fd() const override { return -1; }
  Clock::time_point due() const override { return has_news() ? Clock::now() : leader_.due(); }
  void handle() override;
  void send(const FromNode& message) override;
  void report_signal(int signal) override;
  bool leads() const override { return true; }
  const char* waits() const override { return "waits to restart"; }

 private:
  void deliver();

  const LaunchOptions& options_;
  const std::string master_addr_;
  const std::string job_id_;
  base::HeldPort port_;
  JobLeader leader_;
};

}  // namespace syncbn::launch
