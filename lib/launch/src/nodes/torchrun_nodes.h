#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "job/torchrun_protocol.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// The nodes of our job that torchrun runs: their agents use torchrun's keys in our store. (If
/// torchrun runs node 0, see TorchrunLead.) Not thread-safe.
class TorchrunNodes {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Barrier { kOccupied, kLeft, kBroken };

  /// @param store outlives this object. @param count of the job's nodes, ours and torchrun's.
  TorchrunNodes(StoreServer& store, const std::string& run_id, int count);

  /// Looks for new ones. @param is_ours whether a launcher of ours runs that node.
  void find(const std::function<bool(int)>& is_ours);
  /// By node rank.
  const std::map<int, TorchrunRole>& all() const { return nodes_; }
  bool has(int node) const { return nodes_.count(node) > 0; }

  /// Lets a node's workers start.
  void assign(int node, const AssignedRanks& ranks);

  /// After success: our nodes enter the barrier through which torchrun's agents leave.
  void enter_barrier(size_t our_nodes);
  /// kOccupied while agents are in it; then whether all had arrived. To be called when the store
  /// has been used, and at the deadline.
  Barrier barrier();
  /// When all agents have to have left the barrier; nothing until all have arrived.
  std::optional<Clock::time_point> barrier_deadline() const { return barrier_deadline_; }

 private:
  StoreServer& store_;
  const TorchrunKeys keys_;
  const int count_;
  std::map<int, TorchrunRole> nodes_;
  std::optional<Clock::time_point> barrier_deadline_;
};

}  // namespace syncbn::launch
