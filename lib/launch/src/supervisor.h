#pragma once

#include <syncbn/launch/options.h>

#include <memory>
#include <optional>
#include <string>

#include "common/signals.h"
#include "job/run_context.h"
#include "job/status_socket.h"
#include "nodes/node_link.h"
#include "output/event_log.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "ssh/ssh_node.h"
#include "workers/program.h"
#include "workers/worker_group.h"

namespace syncbn::launch {

/// Runs this node's workers, attempt after attempt as --max_restarts allows, and reports how they
/// ended.
class Supervisor {
 public:
  /// @param link to the leader of the job.
  /// @param node the link to the head that started this launcher; null without one.
  Supervisor(const LaunchOptions& options, const RunContext& context, const Command& command,
             std::unique_ptr<NodeLink> link, SshNode* node);

  /// Returns the launcher's exit code: 0; that of the first worker of any node that failed in the
  /// last attempt (128 + signal); 128 + the signal that ended the launcher; 75 if output was lost.
  int run();

 private:
  GroupResult run_attempts();
  GroupResult run_attempt();
  /// Waits for the start of the next attempt or the end of the job. Returns the signal that ended
  /// the wait, if one did.
  std::optional<int> wait_for_leader(std::optional<Start>& start);
  void apply(const Assignment& start);
  /// Writes the flight records of all ranks to a file.
  void write_records(const FlightFile& records);
  GroupResult finish(const JobFailure& end, bool was_printed);
  void announce_attempt(int restarts_before);
  void report(const GroupResult& result);
  /// Warns if an option of the launcher is among the program's arguments.
  void hint_at_place();
  std::string json_of(const GroupResult& result) const;

  const LaunchOptions& options_;
  RunContext context_;
  const Command& command_;
  std::unique_ptr<NodeLink> link_;
  SshNode* const node_;
  GroupResult last_;                 ///< of this node's last attempt
  std::vector<RankMemory> records_;  ///< its workers' flight records
  std::string resume_;  ///< the command that continues the job, from the last attempt that had one
  std::optional<int> signal_;  ///< that this launcher has reported to the leader
  bool interrupted_ = false;  ///< a signal or another node has ended the job: see wait_for_reader()
  Signals signals_;
  LogFolder logs_;
  Output output_;
  EventLog events_;
  StatusServer status_;
};

}  // namespace syncbn::launch
