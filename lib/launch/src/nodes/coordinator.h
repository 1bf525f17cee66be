#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <map>
#include <string>
#include <vector>

#include "common/clock.h"
#include "nodes/local_link.h"
#include "nodes/peers.h"
#include "nodes/torchrun.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// The link of node 0 of several nodes, and the job's server: connects the launchers of the other
/// nodes, and the agents of torchrun, with the JobLeader. It also serves the workers' store, which
/// it empties between attempts. The folder's README lists the messages.
///
/// Never waits. Not thread-safe.
class Coordinator : public LocalLink {
 public:
  /// @param context its job_id is unique to this run; workers find it as SYNCBN_JOB_ID.
  /// @param listener listens on the master port.
  Coordinator(const LaunchOptions& options, const RunContext& context, base::UniqueFd listener);

  int fd() const override { return peers_.fd(); }
  Clock::time_point due() const override { return due_; }
  void handle() override;
  void send(const FromNode& message) override;
  void pause() override;

 private:
  void receive(PeerLauncher& node, const FromNode& message);
  void greet(PeerLauncher& node, const Hello& hello);
  /// Why the launcher cannot join this job, or "".
  std::string mismatch(const PeerLauncher& node, const Hello& hello) const;
  void find_torchruns();
  void check_torchruns_barrier();

  void prepare(Start& start) override;
  void send_to(int node, ToNode& message) override;

  /// Whether a client of the store may come from there: with a token, only from the hosts of
  /// launchers that know it.
  bool admits(int client) const;
  /// Prints a line about a stranger, unless there have been many.
  void note_stranger(const std::string& text);

  StoreServer store_;
  TorchrunNodes torchrun_nodes_;
  Peers peers_;
  Clock::time_point due_;
  Clock::time_point next_alive_;
  int attempt_ = -1;
  bool is_in_barrier_ = false;
  const std::vector<std::string> own_addresses_;
  std::map<int, std::vector<int>> left_out_;  ///< by node: ranks whose records had no room
  int strangers_noted_ = 0;
};

}  // namespace syncbn::launch
