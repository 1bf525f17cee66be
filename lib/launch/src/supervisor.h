#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent_reader.h"
#include "environment.h"
#include "error_files.h"
#include "failure_report.h"
#include "keeper.h"
#include "output.h"
#include "program.h"
#include "progress_bar.h"
#include "signals.h"

namespace syncbn::launch {

/// Runs the workers of this node once, from start to end.
///
/// The run goes on until every worker has ended. The first worker that fails, or a signal that asks
/// to end, makes it end early: the workers get SIGTERM (or that signal), after the grace time
/// SIGKILL. Single-threaded: one poll loop.
class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, const RunFacts& facts, Command command);

  /// The launcher's exit code: 0; that of the first worker that failed (128 + signal); 128 + the
  /// signal that ended the launcher.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Worker {
    int rank = 0;
    pid_t pid = 0;
    bool running = true;
    std::optional<int> start_error;  ///< errno of a failed fork or exec
    std::optional<int> wait_status;
    bool ended_by_us = false;
    base::UniqueFd out;
    base::UniqueFd err;
    base::UniqueFd agent;
    AgentReader records;
  };

  void start();
  void wait_for_events();
  void handle_signals();
  void handle_keeper_events();
  void handle_event(const KeeperEvent& event);
  void read_outputs();
  bool read_stream(size_t worker, Stream stream);
  void read_records(size_t worker);
  void drain(size_t worker);
  void handle_deadlines();

  void worker_ended(size_t worker);
  void end_workers(int signal);
  void kill_workers();
  void keeper_is_lost();
  void wait_for_keeper();
  void stop_and_continue();
  bool anyone_runs() const;

  int report_and_exit_code();
  /// Waits until our own reader has taken all of the output. Returns the final exit code.
  int wait_for_reader(int exit_code);
  int report_start_error(const Worker& worker);
  FailureReport failure_report(size_t worker);
  std::string announce_failure(const Worker& worker) const;

  const LaunchOptions& options_;
  const RunFacts& facts_;
  Command command_;
  ErrorFiles error_files_;
  Signals signals_;
  Output output_;
  ProgressBar progress_;
  std::vector<Worker> workers_;
  std::unique_ptr<Keeper> keeper_;

  Clock::time_point started_;
  std::optional<size_t> first_failure_;
  std::chrono::system_clock::time_point failed_at_;
  double failed_after_seconds_ = 0;
  std::optional<int> ended_by_signal_;
  bool ending_ = false;
  bool killed_ = false;
  // Times at which something is due: ending the workers after a failure, saying so, giving up on
  // the grace time (then on the kill).
  std::optional<Clock::time_point> end_at_;
  std::optional<Clock::time_point> announce_at_;
  std::optional<Clock::time_point> deadline_;
};

}  // namespace syncbn::launch
