#include "nodes/torchrun.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "common/json_messages.h"

namespace syncbn::launch {
namespace {

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

std::optional<TorchrunRole> TorchrunNodes::find(int node) const {
  if (store_.clients() == 0) return std::nullopt;  // an agent stays connected
  const auto text = store_.get(keys_.role_info(node));
  const auto role = text ? TorchrunRole::parse(*text) : std::nullopt;
  const bool is_valid = role && role->rank == node && role->local_world_size >= 1 &&
                        role->local_world_size <= kMaxWorkers;
  return is_valid ? role : std::nullopt;
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

TorchrunLink::TorchrunLink(StoreClient store, const LaunchOptions& options, int port)
    : options_(options), port_(port), keys_(options.run_id), store_(std::move(store)) {
  const TorchrunRole own{options.role, options.node_rank, options.nproc_per_node};
  store_.register_client(answer_deadline());
  store_.set(keys_.role_info(options.node_rank), own.str(), answer_deadline());
  store_.start_wait(keys_.assigned_ranks(options.node_rank), answer_deadline());
  say(
      fmt::format("torchrun runs node 0 at {}:{}: no restarts, and failures there "
                  "show as lost connections here",
                  options_.master_addr, port_));
}

void TorchrunLink::handle() {
  if (finish()) return;
  try {
    const base::SignalMask unblocked =
        state_ == State::kJoining ? interruptible() : base::SignalMask(SIG_BLOCK, {});
    if (state_ == State::kRunning) return store_.check_connection();
    if (!store_.wait_done()) return;
    if (state_ == State::kLeaving) return end({});
    state_ = State::kRunning;
    add(Start{{.master_addr = options_.master_addr,
               .master_port = port_,
               .job_id = {},
               .agent_store = shares_store(),
               .node = options_.node_rank,
               .nodes = options_.nnodes.max,
               .ranks = ranks()}});
  } catch (const base::UnavailableError& error) {
    // torchrun's agent closes the store when it leaves the barrier, perhaps before it has answered
    // all others. torchrun counts that as success as well.
    state_ == State::kLeaving ? end({}) : end_unavailable(error.what());
  }
}

AssignedRanks TorchrunLink::ranks() {
  const std::string text = store_.get(keys_.assigned_ranks(options_.node_rank), answer_deadline());
  try {
    return parse_json(text).get<AssignedRanks>();
  } catch (const nlohmann::json::exception&) {
    throw base::UnavailableError(
        fmt::format("torchrun's agent of node 0 assigned ranks that cannot be read: {}", text));
  }
}

void TorchrunLink::end_unavailable(const std::string& why) {
  end(base::kExitUnavailable, fmt::format("torchrun's node 0 is gone: {}", why));
}

void TorchrunLink::send(const FromNode& message) {
  if (const Failed* const failed = std::get_if<Failed>(&message)) end(*failed);
  if (const EndJob* const signal = std::get_if<EndJob>(&message)) end(*signal);
  if (std::holds_alternative<AskAllRecords>(message)) add(AllRecords{});
  // The leader's answers, as far as this node knows them.
  if (const Stalled* const stalled = std::get_if<Stalled>(&message)) stalled_ = *stalled;
  const bool asks = std::holds_alternative<AskStatus>(message);
  if (asks || std::holds_alternative<Stalled>(message)) add(Inquire{});
  if (const Workers* const own = std::get_if<Workers>(&message)) {
    add(Status{own->workers, {}});
    const auto stalled = std::exchange(stalled_, std::nullopt);
    const auto hang =
        stalled ? judge_hang(own->workers, stalled->seconds, stalled->ends) : std::optional<Hang>();
    if (hang) add(NameHang{*hang});
  }
}

void TorchrunLink::report_end(int /*attempt*/) {
  if (finish()) return;
  state_ = State::kLeaving;
  const base::SignalMask unblocked = interruptible();
  try {
    if (store_.add(keys_.members(), 1, answer_deadline()) == options_.nnodes.max) {
      store_.set(keys_.last_member(), kAllArrived, answer_deadline());
    }
    store_.start_wait(keys_.last_member(), answer_deadline());
  } catch (const base::UnavailableError& error) {
    end_unavailable(error.what());
  }
}

}  // namespace syncbn::launch
