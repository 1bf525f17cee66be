#include "nodes/coordinator.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cerrno>

namespace syncbn::launch {

Coordinator::Coordinator(const LaunchOptions& options, std::string job_id, int master_port,
                         base::UniqueFd listener)
    : options_(options),
      job_id_(std::move(job_id)),
      master_port_(master_port),
      store_(std::move(listener), options.store_bytes(),
             {.foreign = [this](base::Channel channel) { peers_.add_newcomer(std::move(channel)); },
              .admits = [this](int client) { return admits(client); }}),
      torchrun_nodes_(store_, options.run_id, options.nnodes.max),
      peers_(Handshake(Handshake::Side::kServer, options.token, options.tls), options.silence(),
             store_.fd()),
      leader_(JobLeader::Policies::of(options, job_id_), Clock::now()),
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
  if (options_.is_check && !hello.is_check && state == JobLeader::State::kFinished) {
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
  const std::string nodes = options_.nnodes.str();
  if (hello.nodes != nodes) {
    return fmt::format("{} was started with --nnodes={}, and node 0 with --nnodes={}", hello.host,
                       hello.nodes, nodes);
  }
  if (hello.max_restarts != options_.max_restarts) {
    return fmt::format("{} was started with --max_restarts={}, and node 0 with --max_restarts={}",
                       hello.host, hello.max_restarts, options_.max_restarts);
  }
  if (hello.is_check == options_.is_check) return "";
  return fmt::format("{} was started with{} --preflight, and node 0 with{}", hello.host,
                     hello.is_check ? "" : "out", hello.is_check ? "out it" : " it");
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
  for (LeaderCommand& command : leader_.take_commands()) {
    std::visit([this](auto& one) { carry_out(one); }, command);
  }
}

void Coordinator::carry_out(const NewAttempt& command) {
  if (command.attempt == 0) joined_ = Clock::now();
  // In the first attempt the store has the keys of torchrun's nodes.
  if (command.attempt > 0) store_.clear();
  if (!shares_store()) workers_port_ = hold_port(0);
}

void Coordinator::carry_out(const Drop& command) {
  const auto found = peers_.nodes().find(command.node);
  if (found == peers_.nodes().end()) return;
  // Peers::gone() names it from now on.
  if (command.why.empty())
    found->second->refused = true;
  else
    found->second->refuse(command.exit_code, command.why);
}

void Coordinator::carry_out(Send& command) {
  if (command.node == Send::kAll) return peers_.send_to_nodes(command.message);
  if (Start* const start = std::get_if<Start>(&command.message)) {
    if (torchrun_nodes_.has(command.node))
      return torchrun_nodes_.assign(command.node, start->ranks);
    start->master_addr = options_.master_addr;
    start->master_port = workers_port_ ? workers_port_->port() : master_port_;
    start->job_id = job_id_;
    start->agent_store = shares_store();
  }
  const auto found = peers_.nodes().find(command.node);
  if (found == peers_.nodes().end()) return;
  PeerLauncher& node = *found->second;
  if (const Record* const record = std::get_if<Record>(&command.message)) {
    return send_record(node, *record);
  }
  if (AllRecords* const all = std::get_if<AllRecords>(&command.message)) {
    const std::vector<int> left_out = std::exchange(left_out_[command.node], {});
    if (!left_out.empty()) {
      all->missing.push_back({"all nodes", left_out, "node 0 cannot send so much at once"});
    }
  }
  if (Status* const status = std::get_if<Status>(&command.message)) {
    constexpr size_t kFrame = size_t{4} << 10;  // bytes of the rest of the message
    const size_t all = status->workers.size();
    const size_t room = Peers::room(node);
    const size_t used = json_line(nlohmann::json(status->silent)).size() + kFrame;
    status->workers = shortened(std::move(status->workers), room - std::min(used, room));
    if (const size_t shown = status->workers.size(); shown < all) {
      status->silent.push_back(
          fmt::format("{} of {} are not shown: node 0 cannot send so much at once", all - shown,
                      base::counted(static_cast<int64_t>(all), "worker")));
    }
  }
  peers_.send(node, command.message);
}

void Coordinator::send_record(PeerLauncher& node, const Record& record) {
  if (!peers_.send_if_room(node, message_line(ToNode(record)))) {
    left_out_[node.rank].push_back(record.rank);
  }
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
