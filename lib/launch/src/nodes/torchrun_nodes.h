#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "job/torchrun_protocol.h"
#include "store/store_server.h"

namespace syncbn::launch {

/// The nodes of our job that torchrun runs: their agents meet us in our store, by torchrun's keys.
/// Where it is torchrun that leads, there is a TorchrunLead. Not thread-safe.
class TorchrunNodes {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Barrier { kOccupied, kLeft, kBroken };

  /// @param store of the job; it outlives this object.
  /// @param count of the job's nodes, ours and theirs.
  TorchrunNodes(StoreServer& store, const std::string& run_id, int count);

  /// Takes in those that have come. @param is_ours whether a node is known, and not torchrun's.
  void find(const std::function<bool(int)>& is_ours);
  /// By node rank.
  const std::map<int, TorchrunRole>& all() const { return nodes_; }
  bool has(int node) const { return nodes_.count(node) > 0; }

  /// Lets a node's workers start.
  void tell_ranks(int node, const AssignedRanks& ranks);

  /// Workers have ended well on so many of our nodes: they enter the barrier through which
  /// torchrun's agents leave.
  void enter_barrier(size_t our_nodes);
  /// Whether agents are in it still, and if not, whether all had come. To be called when the store
  /// has been used, and at the deadline.
  Barrier look_at_barrier();
  /// When the last agents have to have left the barrier; nothing until all have come.
  std::optional<Clock::time_point> barrier_deadline() const { return barrier_deadline_; }

 private:
  StoreServer& store_;
  const TorchrunKeys keys_;
  const int count_;
  std::map<int, TorchrunRole> nodes_;
  std::optional<Clock::time_point> barrier_deadline_;
};

}  // namespace syncbn::launch
