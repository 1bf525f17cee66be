#pragma once

#include <syncbn/base/progress_bar.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/signals.h"
#include "job/run_facts.h"
#include "nodes/cluster.h"
#include "output/event_log.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "workers/group_result.h"
#include "workers/keeper.h"
#include "workers/oom_watch.h"
#include "workers/program.h"
#include "workers/worker.h"

namespace syncbn::launch {

/// The workers of this node in one attempt, from start to end.
///
/// The attempt goes on until every worker has ended. The first worker that fails, on whatever node,
/// or a signal that asks to end, makes it end early: the workers get SIGTERM (or that signal),
/// after the grace time SIGKILL. Processes that the workers started have the grace time to end by
/// themselves when all workers have succeeded, and kHelperPatience after a failure or a signal.
/// Single-threaded: one poll loop.
class WorkerGroup {
 public:
  /// What attempts share, and outlives them.
  struct Run {
    const LaunchOptions& options;
    const Command& command;
    Signals& signals;
    Output& output;
    LogFolder& logs;
    EventLog& events;
    Cluster* cluster;  ///< null on one node
  };

  WorkerGroup(const Run& run, const RunFacts& facts);

  /// The exit code is 0; that of the first worker that failed (128 + signal); 128 + the signal that
  /// ended the launcher.
  /// @throws base::UnavailableError when the keeper was killed; all workers are then dead.
  GroupResult run();

 private:
  using Clock = std::chrono::steady_clock;

  void start();
  /// The end that the worker gets for a stream: a pipe's, whose reader is kept, or a log file.
  base::UniqueFd open_stream(size_t worker, Stream stream, base::UniqueFd& reader);
  void wait_for_events();
  void handle_signals();
  void end_by_signal(int signal);
  void handle_cluster();
  void tell_cluster(int exit_code, bool may_restart, const std::string& what);
  void handle_keeper_events();
  void handle_event(const KeeperEvent& event);
  void read_outputs();
  bool read_stream(size_t worker, Stream stream);
  void read_records(size_t worker);
  void drain(size_t worker);
  void handle_deadlines();

  void worker_ended(size_t worker);
  void log_end(size_t worker, const std::string& error);
  void end_workers(int signal);
  /// Between the signal to end and SIGKILL.
  std::chrono::milliseconds grace() const;
  void kill_workers();
  void end_helpers();
  void keeper_is_lost();
  void stop_and_continue();
  bool anyone_runs() const;
  bool is_over() const;
  /// As far as is known.
  bool succeeded() const;

  GroupResult result();
  std::string announce_failure(const Worker& worker) const;
  std::string announce_helpers() const;
  std::string grace_time() const;

  const LaunchOptions& options_;
  const Command& command_;
  Signals& signals_;
  Output& output_;
  LogFolder& logs_;
  EventLog& events_;
  Cluster* const cluster_;
  const RunFacts& facts_;
  const OomWatch oom_;
  base::ProgressBar progress_;
  std::vector<Worker> workers_;
  std::unique_ptr<Keeper> keeper_;

  Clock::time_point started_;
  std::optional<FirstFailure> first_failure_;
  std::optional<int> ended_by_signal_;
  std::string stopped_for_;  ///< what another node has said, and we have passed on
  bool cluster_is_due_ = false;
  bool ending_ = false;
  bool killed_ = false;
  Left left_ = Left::kWorkers;
  // Times at which something is due: ending the workers after a failure, saying what the launcher
  // waits for, giving up on the grace time (then on the kill).
  std::optional<Clock::time_point> end_at_;
  std::optional<Clock::time_point> announce_at_;
  std::optional<Clock::time_point> deadline_;
};

}  // namespace syncbn::launch
