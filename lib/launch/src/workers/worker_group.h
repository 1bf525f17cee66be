#pragma once

#include <poll.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/clock.h"
#include "job/run_context.h"
#include "nodes/node_link.h"
#include "output/event_log.h"
#include "output/log_folder.h"
#include "output/output.h"
#include "workers/group_result.h"
#include "workers/keeper.h"
#include "workers/node_agent.h"
#include "workers/program.h"
#include "workers/progress_watch.h"

namespace syncbn::launch {

/// The workers of this node in one attempt: starts them, reads what they write, and does what their
/// NodeAgent decides. Not thread-safe.
class WorkerGroup {
 public:
  /// What the attempts of a run share. Must outlive the WorkerGroup.
  struct Run {
    const LaunchOptions& options;
    const Command& command;
    Output& output;
    LogFolder& logs;
    EventLog& events;
    NodeLink& link;
  };

  /// Starts the workers.
  WorkerGroup(const Run& run, const RunContext& context);

  /// Adds what to wait for before the next handle(), until the time that it returns.
  Clock::time_point add_to(std::vector<pollfd>& polls) const;
  /// Call it after each wait, before what the workers are asked for.
  void forgive_own_silence() { watch_.forgive_own_silence(Clock::now()); }
  /// @param polls those of add_to().
  void handle(std::span<const pollfd> polls);
  /// Passes on one of the NodeAgent's events.
  template <class Event>
  void on(const Event& event) {
    agent_.receive(event, Clock::now());
    carry_out_commands();
  }
  void on(const Hold& /*message*/) { watch_.forgive_silence(); }
  /// What the workers do now.
  std::vector<WorkerState> states() { return watch_.states(); }
  /// Answers AskRecords, also after finish().
  void send_records(int question) const;

  /// Whether the attempt is over but for finish().
  bool is_over() const { return agent_.state() == NodeAgent::State::kOver || keeper_->gone(); }
  bool is_ending() const { return agent_.is_ending(); }
  /// Ends what is left of the workers.
  /// @throws base::UnavailableError if the keeper was killed. All workers are then dead.
  GroupResult finish();

 private:
  void start();
  base::UniqueFd share_secret_of_workers() const;
  /// Opens what the worker writes to: a log file, or a pipe, whose other end goes to `reader`.
  base::UniqueFd open_stream(size_t worker, Stream stream, base::UniqueFd& reader);
  void handle_event(const KeeperEvent& event);
  OutputPipes::Sink sink(size_t worker);
  void check_progress();

  void carry_out_commands();
  void carry_out(const AgentCommand& command);
  /// Writes to the workers' logs why the attempt ends.
  /// @param except the local rank of a worker that has written it itself, or -1
  void note_in_logs(const std::string& reason, int except);
  void log_end(size_t worker, const std::string& error);
  void show_threads(const WorkerProcess& worker);

  GroupResult result();
  double seconds_since_start() const { return base::seconds_since(started_); }

  const Run run_;
  const RunContext& context_;
  const OomWatch oom_;
  NodeAgent agent_;
  std::vector<Worker> workers_;
  const Clock::time_point started_ = Clock::now();
  ProgressWatch watch_;
  std::unique_ptr<Keeper> keeper_;
  FailureReport failure_;  ///< the first, if the agent knows of one
};

}  // namespace syncbn::launch
