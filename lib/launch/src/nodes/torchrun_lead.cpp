#include "nodes/torchrun_lead.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

namespace syncbn::launch {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point soon() {
  return Clock::now() + std::chrono::seconds(5);
}

// A wait in the background has no deadline.
Clock::time_point never() {
  return Clock::now() + std::chrono::hours(24 * 365);
}

}  // namespace

TorchrunLead::TorchrunLead(StoreClient store, const LaunchOptions& options)
    : options_(options), keys_(options.run_id), store_(std::move(store)) {
  const TorchrunRole own{options.role, options.node_rank, options.nproc_per_node};
  store_.count_in(soon());
  store_.set(keys_.role_info(options.node_rank), own.str(), soon());
  store_.start_wait({keys_.assigned_ranks(options.node_rank)}, never());
}

std::optional<AssignedRanks> TorchrunLead::ranks() {
  if (!store_.wait_done()) return std::nullopt;
  const std::string text = store_.get(keys_.assigned_ranks(options_.node_rank), soon());
  const auto ranks = AssignedRanks::parse(nlohmann::json::parse(text, nullptr, false));
  if (ranks) return ranks;
  throw base::UnavailableError(
      fmt::format("torchrun's agent of node 0 assigned ranks that cannot be read: {}", text));
}

void TorchrunLead::check() {
  store_.check_connection();
}

void TorchrunLead::leave() {
  if (store_.add(keys_.members(), 1, soon()) == options_.nnodes.max) {
    store_.set(keys_.last_member(), "all are here", soon());
  }
  store_.start_wait({keys_.last_member()}, never());
}

bool TorchrunLead::all_have_left() {
  return store_.wait_done();
}

}  // namespace syncbn::launch
