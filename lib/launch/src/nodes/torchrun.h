#pragma once

#include <syncbn/launch/options.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "job/torchrun_protocol.h"
#include "store/store_client.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// Whether workers use the launchers' store, as torch's agents decide it. Otherwise rank 0 runs a
/// store at a free port of node 0.
bool shares_store();

/// The nodes of our job that torchrun runs: their agents use torchrun's keys in our store. (If
/// torchrun runs node 0, see TorchrunLead.) Not thread-safe.
class TorchrunNodes {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Barrier { kOccupied, kLeft, kBroken };

  /// @param store must outlive this object.
  /// @param count the number of nodes in the job, ours and torchrun's.
  TorchrunNodes(StoreServer& store, const std::string& run_id, int count);

  /// Looks for agents that have joined. @param is_ours whether our launcher runs a node.
  void find(const std::function<bool(int)>& is_ours);
  /// By node rank.
  const std::map<int, TorchrunRole>& all() const { return nodes_; }
  bool has(int node) const { return nodes_.contains(node); }

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
  std::map<int, TorchrunRole> nodes_;
  std::optional<Clock::time_point> barrier_deadline_;
};

/// A job whose node 0 torchrun runs. Its agent there holds the store and does not learn of failures
/// or restarts elsewhere. This launcher joins, gets its ranks, and leaves through the agents'
/// barrier. Calls wait up to 30 s for an answer of the store; they throw base::UnavailableError
/// when it is gone.
class TorchrunLead {
 public:
  /// @param store a connection to the store of node 0's agent.
  TorchrunLead(StoreClient store, const LaunchOptions& options);

  /// Readable when ranks() or all_have_left() may have changed.
  int fd() const { return store_.fd(); }
  /// Empty until all agents have joined.
  std::optional<AssignedRanks> ranks();
  /// For use while workers run. @throws base::UnavailableError when the store is gone.
  void check() { store_.check_connection(); }
  /// Enters the barrier, after our workers have succeeded.
  void leave();
  /// Whether all agents are in the barrier.
  bool all_have_left() { return store_.wait_done(); }

 private:
  const LaunchOptions& options_;
  const TorchrunKeys keys_;
  StoreClient store_;
};

}  // namespace syncbn::launch
