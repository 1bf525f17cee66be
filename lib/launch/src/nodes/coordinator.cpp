#include "nodes/coordinator.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cerrno>

#include "nodes/master_port.h"

namespace syncbn::launch {
namespace {

// Leaves out what node 0 cannot send at once.
void shorten(Status& status, size_t room) {
  constexpr size_t kFrame = size_t{4} << 10;  // bytes of the rest of the message
  const auto all = std::ssize(status.workers);
  const size_t used = json_line(nlohmann::json(status.silent)).size() + kFrame;
  status.workers = shortened(std::move(status.workers), room - std::min(used, room));
  const auto left_out = all - std::ssize(status.workers);
  if (left_out == 0) return;
  status.silent.emplace_back(
      fmt::format("{} of {} are not shown: node 0 cannot send so much at once", left_out,
                  base::counted(all, "worker")));
}

}  // namespace

Coordinator::Coordinator(const LaunchOptions& options, std::string job_id, int master_port,
                         base::UniqueFd listener)
    : options_(options),
      job_id_(std::move(job_id)),
      master_port_(master_port),
      store_(std::move(listener), options.store_bytes(),
             {.foreign = [this](base::Channel channel) { peers_.add_newcomer(std::move(channel)); },
              .admits = [this](int client) { return admits(client); }}),
      torchrun_nodes_(store_, options.run_id, options.nnodes.max),
      peers_(Handshake(Handshake::Side::kServer, options.token), options.silence(), store_.fd()),
      leader_(options, job_id_, Clock::now()),
      next_alive_(Clock::now() + options.alive_period) {
  due_ = std::min(leader_.due(), next_alive_);
}

void Coordinator::handle() {
  store_.handle();
  for (const std::string& notice : store_.take_notices()) notices_.push_back(notice);
  for (const std::string& refusal : store_.take_refusals()) note_stranger(refusal);
  find_torchruns();
  peers_.handle([this](PeerLauncher& node, const FromNode& message) { receive(node, message); });
  for (const std::string& refusal : peers_.take_refusals()) note_stranger(refusal);
  const auto now = Clock::now();
  leader_.tick(now);
  carry_out_commands();
  for (const int rank : peers_.gone(leader_.excuses_pauses())) {
    leader_.lose(rank, now);
    peers_.remove(rank);
    carry_out_commands();
  }
  check_torchruns_barrier();
  if (now >= next_alive_) {
    next_alive_ = now + options_.alive_period;
    peers_.send_to_nodes(Alive{});
  }
  due_ = std::min(leader_.due(), next_alive_);
  const auto barrier = torchrun_nodes_.barrier_deadline();
  if (leader_.state() == JobLeader::State::kLeaving && barrier) due_ = std::min(due_, *barrier);
}

void Coordinator::receive(PeerLauncher& node, const FromNode& message) {
  if (const Hello* const hello = std::get_if<Hello>(&message))
    greet(node, *hello);
  else if (node.rank >= 0)
    leader_.receive(node.rank, message, Clock::now());
  carry_out_commands();
}

void Coordinator::greet(PeerLauncher& node, const Hello& hello) {
  const JobLeader::State state = leader_.state();
  if (options_.is_check && hello.job != options_.run_id && state == JobLeader::State::kFinished) {
    node.channel.fail(ECONNRESET);  // it comes for the job, which will listen here after this check
    return;
  }
  std::string why = mismatch(node, hello);
  if (why.empty()) why = leader_.refusal(hello);
  if (!why.empty()) {
    node.refuse(base::kExitUsage, why);
    if (state == JobLeader::State::kJoining) note_stranger("refused a launcher: " + why);
    return;
  }
  if (hello.exit_code != base::kExitOk) {
    node.refuse(hello.exit_code, hello.what);
    return end_job(hello.exit_code,
                   fmt::format("node {} ({}): {}", hello.node, hello.host, hello.what));
  }
  node.rank = leader_.rank_for(hello.node, hello.leads);
  node.hello = hello;
  peers_.register_node(node);
  peers_.send(node, Welcome{options_.alive_period.count(), options_.silence().count()});
  leader_.join(node.rank, hello, Clock::now());
}

std::string Coordinator::mismatch(const PeerLauncher& node, const Hello& hello) const {
  if (node.rank >= 0) return "a launcher sent two hellos";
  if (hello.job != options_.run_id) {
    return fmt::format("{} belongs to job '{}' (--rdzv_id), and the job at {}:{} is '{}'",
                       hello.host, hello.job, options_.master_addr, master_port_, options_.run_id);
  }
  const auto differs = [&hello](const std::string& theirs, const std::string& ours) {
    return fmt::format("{} was started {}, and node 0 {}", hello.host, theirs, ours);
  };
  if (const std::string nodes = options_.nnodes.str(); hello.nodes != nodes) {
    return differs("with --nnodes=" + hello.nodes, "with --nnodes=" + nodes);
  }
  if (hello.max_restarts != options_.max_restarts) {
    return differs(fmt::format("with --max_restarts={}", hello.max_restarts),
                   fmt::format("with --max_restarts={}", options_.max_restarts));
  }
  return "";
}

void Coordinator::find_torchruns() {
  // torchrun's agents cannot prove that they know a token.
  const bool is_joining = leader_.state() == JobLeader::State::kJoining;
  if (!is_joining || options_.c10d || !options_.token.empty()) return;
  torchrun_nodes_.find([this](int node) { return leader_.has(node); });
  for (const auto& [rank, role] : torchrun_nodes_.all()) {
    if (!leader_.has(rank)) leader_.join_torchrun(rank, role, Clock::now());
  }
  carry_out_commands();
}

void Coordinator::check_torchruns_barrier() {
  using Barrier = TorchrunNodes::Barrier;
  if (leader_.state() != JobLeader::State::kLeaving) return;
  if (!std::exchange(is_in_barrier_, true)) torchrun_nodes_.enter_barrier(peers_.nodes().size());
  const Barrier barrier = torchrun_nodes_.barrier();
  if (barrier == Barrier::kOccupied) return;
  leader_.leave_barrier(/*complete=*/barrier == Barrier::kLeft, Clock::now());
  carry_out_commands();
}

void Coordinator::end_job(int exit_code, const std::string& text) {
  leader_.end(exit_code, text, Clock::now());
  carry_out_commands();
}

void Coordinator::carry_out_commands() {
  for (auto& [node, message] : leader_.take_commands()) {
    if (node == LeaderCommand::kHere) notices_.push_back(std::get<Waiting>(message).message);
    if (node == LeaderCommand::kAll) peers_.send_to_nodes(message);
    if (Start* const start = std::get_if<Start>(&message)) {
      complete(*start);
      if (torchrun_nodes_.has(node)) torchrun_nodes_.assign(node, start->ranks);
    }
    const auto peer = peers_.nodes().find(node);
    if (peer != peers_.nodes().end()) send(*peer->second, message);
  }
}

void Coordinator::complete(Start& start) {
  const bool begins = attempt_ != start.attempt;
  // In the first attempt the store has the keys of torchrun's nodes.
  if (begins && start.attempt > 0) store_.clear();
  if (begins && !shares_store()) workers_port_ = hold_port(0);
  attempt_ = start.attempt;
  start.master_addr = options_.master_addr;
  start.master_port = workers_port_ ? workers_port_->port() : master_port_;
  start.job_id = job_id_;
  start.agent_store = shares_store();
}

void Coordinator::send(PeerLauncher& node, ToNode& message) {
  if (const auto* const refusal = std::get_if<Refuse>(&message)) {
    return node.refuse(refusal->exit_code, refusal->message);  // Peers::gone() names it
  }
  if (const auto* const record = std::get_if<Record>(&message)) {
    if (!peers_.send_if_room(node, message)) left_out_[node.rank].push_back(record->rank);
    return;
  }
  if (auto* const all = std::get_if<AllRecords>(&message)) {
    const std::vector<int> left_out = std::exchange(left_out_[node.rank], {});
    if (!left_out.empty()) {
      all->missing.push_back({"all nodes", left_out, "node 0 cannot send so much at once"});
    }
  }
  if (auto* const status = std::get_if<Status>(&message)) shorten(*status, Peers::room(node));
  peers_.send(node, message);
}

bool Coordinator::admits(int client) const {
  const std::string address = base::peer_address(client);
  if (options_.token.empty() || address == base::peer_address(client, /*own=*/true)) return true;
  return std::ranges::any_of(peers_.nodes(), [&address](const auto& one) {
    return one.second->address == address ||
           std::ranges::count(one.second->hello.addresses, address) > 0;
  });
}

void Coordinator::note_stranger(const std::string& text) {
  constexpr int kMaxNotes = 20;
  if (++strangers_noted_ < kMaxNotes) notices_.push_back(text);
  if (strangers_noted_ == kMaxNotes) notices_.push_back(text + " (further ones are not shown)");
}

}  // namespace syncbn::launch
