#pragma once

#include <signal.h>
#include <syncbn/base/signal_mask.h>
#include <syncbn/launch/options.h>

#include <optional>
#include <string>

#include "common/clock.h"
#include "job/torchrun_protocol.h"
#include "nodes/node_link.h"
#include "store/store_client.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// Whether workers use the launchers' store, as torch's agents decide it. Otherwise rank 0 runs a
/// store at a free port of node 0.
bool shares_store();

/// The nodes of our job that torchrun runs: their agents use torchrun's keys in our store. (If
/// torchrun runs node 0, see TorchrunLink.) Not thread-safe.
class TorchrunNodes {
 public:
  enum class Barrier { kOccupied, kLeft, kBroken };

  /// @param store must outlive this object.
  /// @param count the number of nodes in the job, ours and torchrun's.
  TorchrunNodes(StoreServer& store, const std::string& run_id, int count);

  /// What the agent of a node has told of itself; empty if none has joined.
  std::optional<TorchrunRole> find(int node) const;

  /// Publishes a node's ranks, which starts its workers.
  void assign(int node, const AssignedRanks& ranks);

  /// Enters our nodes, whose workers have succeeded, into the barrier through which the agents
  /// leave.
  void enter_barrier(size_t our_nodes);
  /// kOccupied while agents are in the barrier, then whether all had arrived. Call it after each
  /// use of the store, and at the deadline.
  Barrier barrier();
  /// The time by which all agents have to leave the barrier; empty until all have arrived.
  std::optional<Clock::time_point> barrier_deadline() const { return barrier_deadline_; }

 private:
  StoreServer& store_;
  const TorchrunKeys keys_;
  const int count_;
  std::optional<Clock::time_point> barrier_deadline_;
};

/// For a blocking call while no workers run: lets these signals end this process.
inline base::SignalMask interruptible() {
  return {SIG_UNBLOCK, {SIGINT, SIGTERM, SIGHUP, SIGQUIT}};
}

/// The link to torchrun's agent that runs node 0. It holds the store and does not learn of failures
/// or restarts elsewhere: this launcher joins, gets its ranks, and leaves through the agents'
/// barrier. A failure here ends this node alone, and `status` and hangs are about its workers
/// alone. Calls wait up to 30 s for an answer of the store.
class TorchrunLink : public NodeLink {
 public:
  /// @param store a connection to the store of node 0's agent, at `port`.
  /// @throws base::UnavailableError if the store is gone.
  TorchrunLink(StoreClient store, const LaunchOptions& options, int port);

  int fd() const override { return finish() ? -1 : store_.fd(); }
  Clock::time_point due() const override { return Clock::time_point::max(); }
  void handle() override;
  void send(const FromNode& message) override;
  void report_end(int attempt) override;

 private:
  /// The ranks of this node's workers, which the store has once all agents have joined.
  AssignedRanks ranks();
  void end_unavailable(const std::string& why);

  const LaunchOptions& options_;
  const int port_;
  const TorchrunKeys keys_;
  StoreClient store_;
  enum class State { kJoining, kRunning, kLeaving };
  State state_ = State::kJoining;
  std::optional<Stalled> stalled_;  ///< until the workers' states are known
};

}  // namespace syncbn::launch
