#include "nodes/torchrun_nodes.h"

#include <syncbn/launch/options.h>

#include <nlohmann/json.hpp>

namespace syncbn::launch {
namespace {

// Time limit for torchrun's agents to end after the last one's arrival in the barrier.
constexpr std::chrono::seconds kBarrierTimeout{5};

}  // namespace

TorchrunNodes::TorchrunNodes(StoreServer& store, const std::string& run_id, int count)
    : store_(store), keys_(run_id), count_(count) {}

void TorchrunNodes::find(const std::function<bool(int)>& is_ours) {
  for (int node = 0; node < count_; ++node) {
    if (has(node) || is_ours(node)) continue;
    const auto text = store_.get(keys_.role_info(node));
    if (!text) continue;
    const auto role = TorchrunRole::parse(*text);
    if (!role || role->node != node || role->nproc < 1 || role->nproc > kMaxWorkers) continue;
    nodes_[node] = *role;
  }
}

void TorchrunNodes::assign(int node, const AssignedRanks& ranks) {
  store_.set(keys_.assigned_ranks(node), ranks.json().dump());
}

void TorchrunNodes::enter_barrier(size_t our_nodes) {
  store_.add(keys_.members(), static_cast<int64_t>(our_nodes));
}

TorchrunNodes::Barrier TorchrunNodes::barrier() {
  const bool all_in = store_.get(keys_.members()) == std::to_string(count_);
  if (all_in && !barrier_deadline_) {
    store_.set(keys_.last_member(), "all are here");
    barrier_deadline_ = Clock::now() + kBarrierTimeout;
  }
  // Until they disconnect, they read from the store.
  const bool late = barrier_deadline_ && Clock::now() >= *barrier_deadline_;
  if (store_.clients() > 0 && !late) return Barrier::kOccupied;
  return all_in ? Barrier::kLeft : Barrier::kBroken;
}

}  // namespace syncbn::launch
