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
  const size_t used = json_line(nlohmann::json(status.notes)).size() + kFrame;
  status.workers = shortened(std::move(status.workers), room - std::min(used, room));
  const auto left_out = all - std::ssize(status.workers);
  if (left_out == 0) return;
  status.notes.emplace_back(
      fmt::format("{} of {} are not shown: node 0 cannot send so much at once", left_out,
                  base::counted(all, "worker")));
}

}  // namespace

Coordinator::Coordinator(const LaunchOptions& options, const RunContext& context,
                         base::UniqueFd listener)
    : LocalLink(options, context),
      store_(std::move(listener), options.store_bytes(),
             {.foreign = [this](base::Channel channel) { peers_.add_newcomer(std::move(channel)); },
              .admits = [this](int client) { return admits(client); }}),
      torchrun_nodes_(store_, options.run_id, options.nnodes.max),
      peers_(Handshake(Handshake::Side::kServer, options.token), options.silence(), store_.fd()),
      due_(Clock::now()),
      next_alive_(Clock::now() + options.alive_period),
      own_addresses_(own_addresses()) {
  if (!is_local_address(options.master_addr)) {
    // Not an error: others may reach it through a service or a router.
    say(fmt::format("--master_addr={} is not an address of this machine, which is node 0",
                    options.master_addr));
  }
  join(own_name(options));
}

void Coordinator::handle() {
  store_.handle();
  for (const std::string& notice : store_.take_notices()) say(base::printable(notice));
  for (const std::string& refusal : store_.take_refusals()) note_stranger(refusal);
  find_torchruns();
  peers_.handle([this](PeerLauncher& node, const FromNode& message) { receive(node, message); });
  for (const std::string& refusal : peers_.take_refusals()) note_stranger(refusal);
  LocalLink::handle();
  const auto now = Clock::now();
  for (const int rank : peers_.gone([this](int node) { return leader_.excuses(node); })) {
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

void Coordinator::send(const FromNode& message) {
  LocalLink::send(message);
  due_ = Clock::now();  // for what follows from it
}

void Coordinator::pause() {
  peers_.send_to_nodes(Pause{});
  LocalLink::pause();
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
    return leader_.end(hello.exit_code,
                       fmt::format("node {} ({}): {}", hello.node, hello.host, hello.what),
                       Clock::now());
  }
  node.rank = leader_.rank_for(hello.node, /*leads=*/false);
  node.hello = hello;
  peers_.register_node(node);
  peers_.send(node, Welcome{options_.alive_period.count(), options_.silence().count()});
  leader_.join(node.rank, hello, Clock::now());
}

std::string Coordinator::mismatch(const PeerLauncher& node, const Hello& hello) const {
  if (node.rank >= 0) return "a launcher sent two hellos";
  const auto differs = [&hello](const std::string& theirs, const std::string& ours) {
    return fmt::format("{} was started {}, and node 0 {}", hello.host, theirs, ours);
  };
  if (hello.job != options_.run_id) {
    return fmt::format("{} belongs to job '{}' (--rdzv_id), and the job at {}:{} is '{}'",
                       hello.host, hello.job, options_.master_addr, master_port_, options_.run_id);
  }
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
  for (int node = 0; node < options_.nnodes.max; ++node) {
    const auto role = leader_.has(node) ? std::nullopt : torchrun_nodes_.find(node);
    if (role) leader_.join_torchrun(node, *role, Clock::now());
  }
  carry_out_commands();
}

void Coordinator::check_torchruns_barrier() {
  using Barrier = TorchrunNodes::Barrier;
  if (leader_.state() != JobLeader::State::kLeaving) return;
  if (!std::exchange(is_in_barrier_, true))
    torchrun_nodes_.enter_barrier(peers_.nodes().size() + 1);
  const Barrier barrier = torchrun_nodes_.barrier();
  if (barrier == Barrier::kOccupied) return;
  leader_.leave_barrier(/*complete=*/barrier == Barrier::kLeft, Clock::now());
  carry_out_commands();
}

void Coordinator::prepare(Start& start) {
  const bool begins = attempt_ != start.attempt;  // this is the first node of the attempt
  // In the first attempt the store has the keys of torchrun's nodes.
  if (begins && start.attempt > 0) store_.clear();
  if (begins && !shares_store()) port_ = hold_port(0);
  attempt_ = start.attempt;
  start.master_port = port_ ? port_->port() : master_port_;
  start.agent_store = shares_store();
}

void Coordinator::send_to(int rank, ToNode& message) {
  if (rank == LeaderCommand::kAll) return peers_.send_to_nodes(message);
  const auto found = peers_.nodes().find(rank);
  if (found == peers_.nodes().end()) {  // torchrun's
    if (const auto* const start = std::get_if<Start>(&message)) {
      torchrun_nodes_.assign(rank, start->ranks);
    }
    return;
  }
  PeerLauncher& node = *found->second;
  if (const auto* const refusal = std::get_if<Refuse>(&message)) {
    return node.refuse(refusal->exit_code, refusal->message);  // Peers::gone() names it
  }
  if (const auto* const record = std::get_if<Record>(&message)) {
    if (!peers_.send_if_room(node, message)) left_out_[rank].push_back(record->record.rank);
    return;
  }
  if (auto* const all = std::get_if<AllRecords>(&message)) {
    const std::vector<int> left_out = std::exchange(left_out_[rank], {});
    if (!left_out.empty()) {
      all->missing.push_back({"all nodes", left_out, "node 0 cannot send so much at once"});
    }
  }
  if (auto* const status = std::get_if<Status>(&message)) shorten(*status, Peers::room(node));
  peers_.send(node, message);
}

bool Coordinator::admits(int client) const {
  const std::string address = base::peer_address(client);
  if (options_.token.empty() || address == base::peer_address(client, /*own=*/true) ||
      std::ranges::count(own_addresses_, address) > 0) {
    return true;
  }
  return std::ranges::any_of(peers_.nodes(), [&address](const auto& one) {
    return one.second->address == address ||
           std::ranges::count(one.second->hello.addresses, address) > 0;
  });
}

void Coordinator::note_stranger(const std::string& text) {
  constexpr int kMaxNotes = 20;
  if (++strangers_noted_ > kMaxNotes) return;
  say(base::printable(text) +
      (strangers_noted_ == kMaxNotes ? " (further ones are not shown)" : ""));
}

}  // namespace syncbn::launch
