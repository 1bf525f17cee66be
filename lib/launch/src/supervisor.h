#pragma once

#include <syncbn/launch/options.h>

#include <optional>

#include "common/signals.h"
#include "job/run_context.h"
#include "nodes/cluster.h"
#include "nodes/master_port.h"
#include "output/event_log.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "ssh/ssh_node.h"
#include "workers/program.h"
#include "workers/worker_group.h"

namespace syncbn::launch {

/// Runs the workers of this node to the end, attempt after attempt as --max_restarts allows, and
/// says what became of them.
class Supervisor {
 public:
  /// @param cluster the other nodes; null on one.
  /// @param node to a head that started this launcher; null without one.
  Supervisor(const LaunchOptions& options, const RunContext& context, const Command& command,
             Cluster* cluster, SshNode* node);

  /// The launcher's exit code: 0; that of the first worker that failed (128 + signal) in the last
  /// attempt, on whatever node; 128 + the signal that ended the launcher; 75 when output was lost.
  int run();

 private:
  GroupResult run_attempts();
  GroupResult run_alone();
  GroupResult run_with_others();
  GroupResult run_attempt();
  /// Waits for the next attempt or the end of the job. The signal that ended the wait, if one did.
  std::optional<int> wait_for_orders();
  void take_place(const Cluster::Start& start);

  bool may_restart(const GroupResult& result) const;
  /// A signal came while a failed attempt was ending.
  GroupResult ended_instead_of_restart(int signal);
  /// A store with keys of the attempt before would lead the new one astray.
  void renew_master_port();
  void announce_restart();
  void announce_attempt(const Cluster::Start& start, int restarts_before);
  void report(const GroupResult& result);
  std::string json_of(const GroupResult& result) const;

  const LaunchOptions& options_;
  RunContext context_;
  const Command& command_;
  Cluster* const cluster_;
  SshNode* const node_;
  GroupResult last_;  ///< attempt of this node
  /// A signal or another node has ended the job: whoever does not read our output is not waited
  /// for.
  bool hurried_ = false;
  Signals signals_;
  LogFolder logs_;
  Output output_;
  EventLog events_;
  std::optional<base::HeldPort> port_;
};

}  // namespace syncbn::launch
