#pragma once

#include <syncbn/base/clock.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/signals.h"
#include "job/run_context.h"
#include "job/status_socket.h"
#include "nodes/node_link.h"
#include "output/event_log.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "workers/group_result.h"
#include "workers/keeper.h"
#include "workers/program.h"
#include "workers/progress_watch.h"

namespace syncbn::launch {

/// The workers of this node in one attempt, from start to end. Single-threaded: one poll loop.
///
/// The attempt lasts until every worker has ended. It ends early at the first failure of a worker
/// on any node, or at a signal: the workers get SIGTERM, or that signal, and SIGKILL after the
/// grace period. Helpers, the processes that workers started, may run for the grace period after
/// all workers have succeeded, and for kHelperPatience after a failure or a signal.
class WorkerGroup {
 public:
  /// What the attempts of a run share. Must outlive the WorkerGroup.
  struct Run {
    const LaunchOptions& options;
    const Command& command;
    Signals& signals;
    Output& output;
    LogFolder& logs;
    EventLog& events;
    StatusServer& status;
    NodeLink& link;
  };

  WorkerGroup(const Run& run, const RunContext& context);

  /// The result's exit code is 0, that of the first worker that failed (128 + signal), or 128 + the
  /// signal that ended the launcher.
  /// @throws base::UnavailableError if the keeper was killed. All workers are then dead.
  GroupResult run();

  /// The workers' flight records, after run().
  std::vector<RankMemory> take_records();

 private:
  void handle_lost_keeper();
  void start();
  base::UniqueFd share_secret_of_workers() const;
  /// Opens what the worker writes to: a log file, or a pipe, whose other end goes to `reader`.
  base::UniqueFd open_stream(size_t worker, Stream stream, base::UniqueFd& reader);
  void wait_for_events();
  void handle_signals();
  void end_by_signal(int signal);
  void handle_link();
  template <class Message>
  void on(const Message& /*for the Supervisor*/) {}
  void on(const Waiting& message) { run_.output.announce_for_job("{}", message.message); }
  void on(const Inquire& /*message*/) { run_.link.send(Workers{watch_.states()}); }
  void on(const AskRecords& message);
  void on(const Hold& /*message*/) { watch_.forgive_silence(); }
  void on(const NameHang& message);
  void on(const Status& message);
  void on(const Stop& message);
  void handle_event(const KeeperEvent& event);
  void read_outputs();
  OutputPipes::Sink sink(size_t worker);
  void handle_deadlines();

  void check_progress();
  void continue_keeper();
  void end_hanging(size_t worker, const std::string& text);
  /// With the step of `worker`, unless it was killed from outside.
  JobFailure failure_of(const Worker& worker, int exit_code, bool may_restart,
                        const std::string& what) const;
  void fail_first(size_t worker, int exit_code, bool may_restart, const std::string& what);
  /// Writes to the workers' logs why the attempt ends.
  /// @param except a worker that has written it itself, or null
  void note_in_logs(const std::string& reason, const Worker* except);

  void worker_ended(size_t worker);
  void log_end(size_t worker, const std::string& error);
  void end_workers(int signal);
  /// Grace period between the signal to end and SIGKILL.
  std::chrono::milliseconds grace() const;
  void kill_workers();
  void end_helpers();
  void stop_and_continue();
  int64_t running() const;  ///< how many workers run
  bool is_over() const { return running() == 0 && (killed_ || left_ == Left::kNothing); }
  /// No failure so far.
  bool succeeded() const { return !ending_ && !first_failure_; }

  GroupResult result();
  void announce_wait();
  std::string grace_time() const { return base::format_seconds(grace()); }
  double seconds_since_start() const { return base::seconds_since(started_); }

  const Run run_;
  const RunContext& context_;
  const OomWatch oom_;
  std::vector<Worker> workers_;
  ProgressWatch watch_;
  std::unique_ptr<Keeper> keeper_;

  Clock::time_point started_;
  std::optional<FirstFailure> first_failure_;
  std::optional<int> ended_by_signal_;
  JobFailure cause_;          ///< GroupResult::cause
  std::optional<Stop> stop_;  ///< the leader's
  bool link_is_due_ = false;
  bool outputs_are_due_ = false;
  bool ending_ = false;
  bool killed_ = false;
  bool only_helpers_were_ended_ = false;  ///< after all workers had succeeded
  bool is_paused_ = false;                ///< the head has stopped the workers
  Left left_ = Left::kWorkers;
  std::optional<Clock::time_point> end_at_;       ///< when to end the workers after a failure
  std::optional<Clock::time_point> announce_at_;  ///< when to print what the launcher waits for
  std::optional<Clock::time_point> deadline_;     ///< of the grace period, then of SIGKILL
};

}  // namespace syncbn::launch
