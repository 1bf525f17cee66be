#include "nodes/torchrun.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>

#include <nlohmann/json.hpp>

#include <utility>
#include "common/json_messages.h"

namespace syncbn::launch {
namespace {

using Clock = std::chrono::steady_clock;

// Time limit for torchrun's agents to leave the barrier after the last one has arrived.
constexpr std::chrono::seconds kBarrierTimeout{5};
constexpr const char* kAllArrived = "all are here";

// Upper bound on a store's answer.
Clock::time_point answer_deadline() {
  return Clock::now() + std::chrono::seconds(30);
}

}  // namespace

bool shares_store() {
  return base::env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE").value_or("0") != "1";
}

TorchrunNodes::TorchrunNodes(StoreServer& store, const std::string& run_id, int count)
    : store_(store), keys_(run_id), count_(count) {}

void TorchrunNodes::find(const std::function<bool(int)>& is_ours) {
  if (store_.clients() == 0) return;  // an agent stays connected
  for (int node = 0; node < count_; ++node) {
    if (has(node) || is_ours(node)) continue;
    const auto text = store_.get(keys_.role_info(node));
    if (!text) continue;
    const auto role = TorchrunRole::parse(*text);
    if (!role || role->rank != node || role->local_world_size < 1 ||
        role->local_world_size > kMaxWorkers)
      continue;
    nodes_[node] = *role;
  }
}

void TorchrunNodes::assign(int node, const AssignedRanks& ranks) {
  store_.set(keys_.assigned_ranks(node), nlohmann::json(ranks).dump());
}

void TorchrunNodes::enter_barrier(size_t our_nodes) {
  store_.add(keys_.members(), static_cast<int64_t>(our_nodes));
}

TorchrunNodes::Barrier TorchrunNodes::barrier() {
  const bool all_in = store_.get(keys_.members()) == std::to_string(count_);
  if (all_in && !barrier_deadline_) {
    store_.set(keys_.last_member(), kAllArrived);
    barrier_deadline_ = Clock::now() + kBarrierTimeout;
  }
  // Agents read from the store until they disconnect.
  const bool late = barrier_deadline_ && Clock::now() >= *barrier_deadline_;
  if (store_.clients() > 0 && !late) return Barrier::kOccupied;
  return all_in ? Barrier::kLeft : Barrier::kBroken;
}

TorchrunLead::TorchrunLead(StoreClient store, const LaunchOptions& options)
    : options_(options), keys_(options.run_id), store_(std::move(store)) {
  const TorchrunRole own{options.role, options.node_rank, options.nproc_per_node};
  store_.register_client(answer_deadline());
  store_.set(keys_.role_info(options.node_rank), own.str(), answer_deadline());
  store_.start_wait(keys_.assigned_ranks(options.node_rank), answer_deadline());
}

std::optional<AssignedRanks> TorchrunLead::ranks() {
  if (!store_.wait_done()) return std::nullopt;
  const std::string text = store_.get(keys_.assigned_ranks(options_.node_rank), answer_deadline());
  try {
    return parse_json(text).get<AssignedRanks>();
  } catch (const nlohmann::json::exception&) {
    throw base::UnavailableError(
        fmt::format("torchrun's agent of node 0 assigned ranks that cannot be read: {}", text));
  }
}

void TorchrunLead::leave() {
  if (store_.add(keys_.members(), 1, answer_deadline()) == options_.nnodes.max) {
    store_.set(keys_.last_member(), kAllArrived, answer_deadline());
  }
  store_.start_wait(keys_.last_member(), answer_deadline());
}

}  // namespace syncbn::launch
