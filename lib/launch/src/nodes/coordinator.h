#pragma once

#include <syncbn/base/held_port.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "job/job_leader.h"
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
  /// Lines for the user at this launcher.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  /// JobLeader::take_records().
  std::optional<FlightFile> take_records() { return leader_.take_records(); }
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
  /// Adds the store, which it prepares if this is the first node of an attempt.
  void complete(Start& start);
  void send(PeerLauncher& node, ToNode& message);

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
  int attempt_ = -1;
  bool is_in_barrier_ = false;
  /// Of rank 0's store in this attempt, if workers do not share the launchers' store.
  std::optional<base::HeldPort> workers_port_;
  std::map<int, std::vector<int>> left_out_;  ///< by node: ranks whose records had no room
  std::vector<std::string> notices_;
  int strangers_noted_ = 0;
};

}  // namespace syncbn::launch
