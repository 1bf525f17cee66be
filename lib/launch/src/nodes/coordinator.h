#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "job/job_leader.h"
#include "nodes/master_port.h"
#include "nodes/peers.h"
#include "nodes/torchrun.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// The server of a job on several nodes, inside the launcher of node 0: connects the launchers, and
/// the agents of torchrun, with the JobLeader, whose commands it carries out. It also serves the
/// workers' store, which it empties between attempts. The folder's README lists the messages.
///
/// Never waits. Not thread-safe.
class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;

  /// @param job_id unique to this run; workers find it as SYNCBN_JOB_ID.
  /// @param listener listens on `master_port`.
  Coordinator(const LaunchOptions& options, std::string job_id, int master_port,
              base::UniqueFd listener);
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  /// Call handle() when fd() is readable, and at due().
  int fd() const { return peers_.fd(); }
  Clock::time_point due() const { return due_; }
  void handle();

  /// Ends the job on all nodes, for a reason other than a failed worker.
  void end_job(int exit_code, const std::string& text);
  /// When all nodes of the first attempt had joined, once.
  std::optional<Clock::time_point> take_joined() { return std::exchange(joined_, std::nullopt); }
  /// Lines for the user at this launcher.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  /// The flight records of all ranks after an attempt that failed, once, before its consequence is
  /// known.
  std::optional<JobRecords> take_records() { return std::exchange(records_, std::nullopt); }
  /// Tells the nodes that this process is about to be stopped, so that they do not take it for
  /// lost.
  void pause() { peers_.send_to_nodes(Pause{}); }

 private:
  void receive(PeerLauncher& node, const FromNode& message);
  void greet(PeerLauncher& node, const Hello& hello);
  /// Why the launcher cannot join this job, or "".
  std::string mismatch(const PeerLauncher& node, const Hello& hello) const;
  void find_torchruns();
  void check_torchruns_barrier();

  void carry_out_commands();
  void carry_out(Send& command);
  void carry_out(const Notice& command) { notices_.push_back(command.text); }
  void carry_out(const NewAttempt& command);
  void carry_out(const Drop& command);
  void carry_out(Save& command) { records_ = std::move(command.records); }
  void carry_out(const EnterBarrier& command) { torchrun_nodes_.enter_barrier(command.nodes); }
  void send_record(PeerLauncher& node, const Record& record);

  /// Whether a client of the store may come from there: with a token, only from the hosts of
  /// launchers that know it.
  bool admits(int client) const;
  /// Adds a line about a stranger, unless there have been many.
  void note_stranger(const std::string& text);

  const LaunchOptions& options_;
  const std::string job_id_;
  const int master_port_;
  StoreServer store_;
  TorchrunNodes torchrun_nodes_;
  Peers peers_;
  JobLeader leader_;
  Clock::time_point due_;
  Clock::time_point next_alive_;
  std::optional<Clock::time_point> joined_;
  /// Of rank 0's store in this attempt, if workers do not share the launchers' store.
  std::optional<base::HeldPort> workers_port_;
  std::map<int, std::vector<int>> left_out_;  ///< by node: ranks whose records had no room
  std::optional<JobRecords> records_;
  std::vector<std::string> notices_;
  int strangers_noted_ = 0;
};

}  // namespace syncbn::launch
