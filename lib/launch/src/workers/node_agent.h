#pragma once

#include <syncbn/launch/options.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "job/job_messages.h"
#include "workers/keeper.h"

namespace syncbn::launch {

/// A worker's process in one attempt.
struct WorkerProcess {
  int rank = 0;
  pid_t pid = 0;
  bool running = true;
  std::optional<int> start_error = {};  ///< errno of a failed fork, binding or exec
  bool bind_failed = false;
  std::optional<int> wait_status = {};
  bool ended_by_us = false;
  std::string hang = {};  ///< Hang::text, if it was killed for that

  // The host sets these before it passes on that the worker has ended.
  std::optional<uint64_t> step = {};  ///< the last that it has reported
  bool out_of_memory = false;         ///< probably killed by the kernel for lack of memory
  std::string error = {};             ///< brief() of its error file
};

/// A signal to the launcher. SIGSTOP and SIGCONT pause the workers.
struct Signal {
  int number;
};

/// What a NodeAgent tells its host to do.
struct AgentCommand {
  enum class Kind {
    kSignal,       ///< send the signal `number` to the workers, or to helpers if no worker runs
    kShowThreads,  ///< print what the threads of the worker `number` do
    kKill,         ///< kill the worker `number`
    kNote,         ///< write `text` to the logs of all workers but `number`, which has written it
    kFail,         ///< send cause() to the leader
    kLogEnd,       ///< log the end of the worker `number`; `text`: why it did not start, or end
    kSay,          ///< print `text`
    kNameHang,     ///< print `text` once for all nodes; `number` is 1 if it stops the time
    kSayHelpers,   ///< print `text` and which helpers run
    kGiveUp,       ///< the launcher ends because of cause()
  };
  Kind kind{};
  int number = -1;
  std::string text = {};
};

/// Decides about the workers of one node in one attempt: when they are signalled and killed, how
/// long their helpers may run, and why the attempt has ended. A state machine: it has no clock and
/// no processes. Each event takes the current time and adds commands, which the host carries out in
/// their order. docs/architecture.md draws the states.
///
/// The attempt lasts until every worker has ended. It ends early at the first failure of a worker
/// on any node, or at a signal: the workers get SIGTERM, or that signal, and SIGKILL after the
/// grace period. Helpers, the processes that workers started, may run for the grace period after
/// all workers have succeeded, and for 3 s after a failure or a signal. Not thread-safe.
class NodeAgent {
 public:
  using Time = Clock::time_point;

  /// Upper bound on the wait after SIGKILL: a process may be uninterruptible in the kernel.
  static constexpr std::chrono::seconds kKillPatience{5};

  /// kFinishing: all workers have succeeded, and what they started still runs. kFailing: a worker
  /// has failed, and the others have not been told. kEnding: they have.
  enum class State { kRunning, kFinishing, kFailing, kEnding, kKilling, kOver };

  /// @param options must outlive this object.
  NodeAgent(const LaunchOptions& options, int attempt, int first_rank);

  void receive(const KeeperEvent& event, Time now);
  void receive(const Stop& message, Time now);
  void receive(const NameHang& message, Time now);
  void receive(const Signal& event, Time now);
  /// The keeper was killed, and all workers with it.
  void lose_keeper(pid_t keeper, Time now);
  /// Call it at due().
  void tick(Time now);
  Time due() const;

  std::vector<AgentCommand> take_commands() { return std::exchange(commands_, {}); }
  State state() const { return state_; }
  /// By local rank. Stays where it is.
  std::vector<WorkerProcess>& workers() { return workers_; }
  bool is_ending() const { return state_ >= State::kEnding; }
  /// Whether workers that make no progress hang.
  bool expects_progress() const { return succeeds() && !paused_; }
  /// Why the attempt has ended early, with its exit code; empty: all workers have succeeded, and
  /// their daemons may go on.
  const std::optional<JobFailure>& cause() const { return cause_; }
  /// The local rank of the first worker that failed.
  const std::optional<size_t>& failed() const { return failed_; }

 private:
  using Kind = AgentCommand::Kind;

  void add(Kind kind, std::string text, int number = -1) {
    commands_.push_back({kind, number, std::move(text)});
  }
  void worker_ended(size_t index);
  void fail(size_t index, const std::string& what);
  void handle_left(Left left);
  void pass_deadline();
  void end_workers(int signal);
  void kill_workers();
  void abandon_workers();
  void announce_wait();
  void check_if_over();
  /// Time between the signal to end and SIGKILL.
  std::chrono::milliseconds grace() const;
  int64_t running() const;  ///< how many workers run
  bool succeeds() const { return state_ == State::kRunning || state_ == State::kFinishing; }

  const LaunchOptions& options_;
  const int attempt_;
  Time now_;  ///< of this event
  std::vector<AgentCommand> commands_;
  std::vector<WorkerProcess> workers_;
  State state_ = State::kRunning;
  Left left_ = Left::kWorkers;
  bool paused_ = false;  ///< the head has stopped the workers
  std::optional<JobFailure> cause_;
  std::optional<size_t> failed_;
  bool was_signalled_ = false;       ///< to end
  std::optional<Time> deadline_;     ///< of the state
  std::optional<Time> announce_at_;  ///< when to print what the launcher waits for
};

}  // namespace syncbn::launch
