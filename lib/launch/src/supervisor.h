#pragma once

#include <syncbn/launch/options.h>

#include <map>
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
/// ended. While a job runs, handle_events() is the only place that waits.
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
  GroupResult run_attempt(const Start& start);

  /// Waits until something happens, and handles it.
  void handle_events();
  void handle_signal(int signal);
  void stop_and_continue();
  void handle_questions();
  void handle_messages();
  template <class Message>
  void on(const Message& /*of the connection*/) {}
  void on(const Waiting& message) { output_.announce_for_job("{}", message.message); }
  void on(const Start& start) {
    if (!workers_run() && !link_->finish()) start_ = start;
  }
  void on(const Stop& message) { pass_on(message); }
  void on(const NameHang& message) { pass_on(message); }
  void on(const Hold& message) { pass_on(message); }
  void on(const Inquire& message);
  void on(const Status& message);
  void on(const AskRecords& message);
  void on(const Record& message) { job_records_.emplace(message.record.rank, message.record); }
  void on(const AllRecords& message);
  template <class Message>
  void pass_on(const Message& message) {
    if (workers_run()) workers_->on(message);
  }
  bool workers_run() const { return workers_ && !workers_->is_over(); }

  /// Writes the flight records of all ranks to a file.
  void write_records(const FlightFile& records);
  /// Whether the first signal to this launcher has ended the attempt or the job.
  bool is_own_signal(const JobFailure& end) const;
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
  std::optional<Start> start_;             ///< of the next attempt
  GroupResult last_;                       ///< of the last attempt
  std::map<int, RankRecord> job_records_;  ///< that have come for `explain`
  std::string resume_;  ///< the command that continues the job, from the last attempt that had one
  std::optional<int> signal_;  ///< the first that ends the job
  bool quits_ = false;         ///< because of a signal, without the leader
  bool interrupted_ = false;  ///< a signal or another node has ended the job: see wait_for_reader()
  Signals signals_;
  LogFolder logs_;
  Output output_;
  EventLog events_;
  StatusServer status_;
  /// Of `explain`, which reads the records of a job's only node itself.
  std::optional<StatusServer> record_requests_;
  std::unique_ptr<WorkerGroup> workers_;  ///< of the last attempt
};

}  // namespace syncbn::launch
