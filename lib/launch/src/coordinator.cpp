#include "coordinator.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;

}  // namespace

struct Coordinator::Node {
  Node(base::UniqueFd socket, std::string first_bytes)
      : link(std::move(socket), std::move(first_bytes)) {}

  AgentLink link;
  bool greeted = false;
  int rank = -1;  ///< of the node
  int nproc = 0;
  std::string host;
  std::string role;
  bool ended = false;  ///< its workers, in this attempt
  Clock::time_point heard = Clock::now();

  std::string name() const { return fmt::format("node {} ({})", rank, host); }
};

Coordinator::Coordinator(Options options, base::UniqueFd listener)
    : options_(std::move(options)),
      torchrun_keys_(options_.run_id),
      store_(std::move(listener),
             [this](base::UniqueFd socket, std::string bytes) {
               take(std::move(socket), std::move(bytes));
             }),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      join_deadline_(Clock::now() + options_.join_timeout),
      next_notice_(Clock::now() + AgentLink::kNoticePeriod),
      next_alive_(Clock::now() + AgentLink::kAlivePeriod) {
  if (!epoll_) base::throw_errno("epoll_create1");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;  // the store
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, store_.fd(), &event);
  due_ = std::min(next_notice_, next_alive_);
}

Coordinator::~Coordinator() = default;

void Coordinator::take(base::UniqueFd socket, std::string first_bytes) {
  auto node = std::make_unique<Node>(std::move(socket), std::move(first_bytes));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = node.get();
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, node->link.fd(), &event);
  newcomers_.push_back(std::move(node));
}

void Coordinator::watch(Node& node) {
  epoll_event event{};
  event.events = EPOLLIN | (node.link.wants_to_write() ? EPOLLOUT : 0U);
  event.data.ptr = &node;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, node.link.fd(), &event);
}

void Coordinator::handle() {
  store_.handle();
  if (state_ == State::kJoining) find_torchrun_nodes();
  if (state_ == State::kLeaving) leave_torchruns_barrier();
  // All of them: a message may come with the connection, and there are few. A newcomer that says
  // hello moves to the nodes.
  for (size_t i = 0; i < newcomers_.size();) {
    Node* const node = newcomers_[i].get();
    handle_node(*node);
    if (i == newcomers_.size() || newcomers_[i].get() != node) continue;
    if (is_gone(*node)) {
      newcomers_.erase(newcomers_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  for (const auto& [rank, node] : nodes_) handle_node(*node);
  std::vector<Node*> gone;
  for (const auto& [rank, node] : nodes_) {
    if (is_gone(*node)) gone.push_back(node.get());
  }
  for (Node* node : gone) lost(*node);
  handle_times();
}

bool Coordinator::is_gone(const Node& node) {
  return node.link.closed() || Clock::now() - node.heard > AgentLink::kSilence;
}

void Coordinator::handle_node(Node& node) {
  node.link.handle();
  if (!node.greeted) {
    const auto greeting = node.link.next_line();
    if (!greeting) return;
    if (*greeting + "\n" != AgentLink::kGreeting) {
      node.link.send({{"type", "refuse"},
                      {"exit_code", base::kExitUsage},
                      {"message", "the launchers of this job are of different versions"}});
      return;
    }
    node.greeted = true;
  }
  while (const auto message = node.link.next()) {
    node.heard = Clock::now();
    try {
      handle_message(node, *message);
    } catch (const Json::exception&) {
      node.link.send({{"type", "refuse"},
                      {"exit_code", base::kExitInternal},
                      {"message", "node 0 does not understand what this launcher says"}});
      return;
    }
  }
  watch(node);
}

void Coordinator::handle_message(Node& node, const Json& message) {
  const std::string type = message.at("type");
  if (type == "hello") hello(node, message);
  if (node.rank < 0) return;
  if (type == "failed") failed(node, message);
  if (type == "ended") ended(node, message);
}

void Coordinator::hello(Node& node, const Json& message) {
  const std::string why = misfit(node, message);
  if (!why.empty()) {
    node.link.send({{"type", "refuse"}, {"exit_code", base::kExitUsage}, {"message", why}});
    return;
  }
  node.rank = rank_for(message.at("node"));
  node.nproc = message.at("nproc");
  node.role = message.at("role");
  node.host = message.at("host");
  const auto self = std::find_if(newcomers_.begin(), newcomers_.end(),
                                 [&](const auto& one) { return one.get() == &node; });
  nodes_[node.rank] = std::move(*self);
  newcomers_.erase(self);
  if (state_ == State::kJoining && all_here()) start_attempt();
}

int Coordinator::rank_for(int wanted) const {
  int rank = 0;
  while (is_here(rank)) ++rank;
  return wanted >= 0 ? wanted : rank;
}

std::string Coordinator::misfit(const Node& node, const Json& message) const {
  const int rank = message.at("node");
  const std::string host = message.at("host");
  if (node.rank >= 0) return "a launcher said hello twice";
  if (message.at("job") != options_.run_id) {
    return fmt::format("{} belongs to job '{}' (--rdzv_id), and the job at {}:{} is '{}'", host,
                       message.at("job").get<std::string>(), options_.master_addr,
                       options_.master_port, options_.run_id);
  }
  if (message.at("nodes") != options_.nodes) {
    return fmt::format("{} was started with --nnodes={}, and node 0 with --nnodes={}", host,
                       message.at("nodes").get<int>(), options_.nodes);
  }
  if (message.at("max_restarts") != options_.max_restarts) {
    return fmt::format("{} was started with --max_restarts={}, and node 0 with --max_restarts={}",
                       host, message.at("max_restarts").get<int>(), options_.max_restarts);
  }
  if (const auto other = nodes_.find(rank); other != nodes_.end()) {
    return fmt::format("two launchers have --node_rank={}: one on {} and one on {}", rank,
                       other->second->host, host);
  }
  if (torchrun_nodes_.count(rank) > 0) {
    return fmt::format("{} has --node_rank={}, and so has a torchrun of this job", host, rank);
  }
  if (state_ != State::kJoining) return "the job has begun without this launcher";
  return "";
}

void Coordinator::failed(Node& node, const Json& message) {
  if (message.at("attempt") != attempt_) return;
  const std::string what =
      fmt::format("{}: {}", node.name(), message.at("what").get<std::string>());
  // Somebody does not want to wait for the others any more.
  if (state_ == State::kJoining) return finish(message.at("exit_code"), what);
  fail(message.at("exit_code"), message.at("may_restart"), what);
}

void Coordinator::ended(Node& node, const Json& message) {
  if (message.at("attempt") != attempt_) return;
  node.ended = true;
  if (state_ == State::kRunning && all_ended()) end_attempt();
}

void Coordinator::lost(Node& node) {
  const std::string name = node.name();
  nodes_.erase(node.rank);
  if (state_ != State::kRunning) return;  // one that joins may come again
  // Its workers are dead, or its keeper sees to that.
  fail(base::kExitUnavailable, false, fmt::format("the launcher of {} is gone", name));
  if (all_ended()) end_attempt();
}

void Coordinator::find_torchrun_nodes() {
  for (int node = 0; node < options_.nodes; ++node) {
    if (is_here(node)) continue;
    const auto text = store_.get(torchrun_keys_.role_info(node));
    if (!text) continue;
    const auto role = TorchrunRole::parse(*text);
    if (role && role->node == node && role->nproc > 0) torchrun_nodes_[node] = *role;
  }
  if (all_here()) start_attempt();
}

bool Coordinator::is_here(int node) const {
  return nodes_.count(node) > 0 || torchrun_nodes_.count(node) > 0;
}

void Coordinator::enter_torchruns_barrier() {
  state_ = State::kLeaving;
  store_.add(torchrun_keys_.members(), static_cast<int64_t>(nodes_.size()));
  leave_torchruns_barrier();
}

void Coordinator::leave_torchruns_barrier() {
  const bool all_in = store_.get(torchrun_keys_.members()) == std::to_string(options_.nodes);
  if (all_in) store_.set(torchrun_keys_.last_member(), "all are here");
  // They still read from the store.
  if (store_.connections() > 0) return;
  if (all_in) return finish(base::kExitOk, "");
  finish(base::kExitUnavailable, "a node that torchrun runs left before its workers had succeeded");
}

void Coordinator::handle_times() {
  const auto now = Clock::now();
  if (state_ == State::kJoining && now >= join_deadline_) {
    finish(base::kExitUnavailable,
           fmt::format(
               "{} did not come within {} (--rdzv_conf=join_timeout=SECONDS)", missing(),
               base::format_seconds(std::chrono::duration<double>(options_.join_timeout).count())));
  }
  if (state_ == State::kJoining && now >= next_notice_) {
    next_notice_ = now + AgentLink::kNoticePeriod;
    send_to_all({{"type", "waiting"}, {"message", fmt::format("waiting for {}", missing())}});
  }
  if (now >= next_alive_) {
    next_alive_ = now + AgentLink::kAlivePeriod;
    send_to_all({{"type", "alive"}});
  }
  due_ = next_alive_;
  if (state_ == State::kJoining) due_ = std::min({due_, next_notice_, join_deadline_});
}

std::string Coordinator::missing() const {
  std::vector<std::string> names;
  for (int rank = 0; rank < options_.nodes; ++rank) {
    if (!is_here(rank)) names.push_back(std::to_string(rank));
  }
  constexpr size_t kNamed = 16;
  std::string rest;
  if (names.size() > kNamed) {
    rest = fmt::format(" and {} more", names.size() - kNamed);
    names.resize(kNamed);
  }
  return fmt::format("node{} {}{}", names.size() == 1 ? "" : "s", base::join(names, ", "), rest);
}

bool Coordinator::all_here() const {
  return static_cast<int>(nodes_.size() + torchrun_nodes_.size()) == options_.nodes;
}

bool Coordinator::all_ended() const {
  return std::all_of(nodes_.begin(), nodes_.end(),
                     [](const auto& one) { return one.second->ended; });
}

void Coordinator::start_attempt() {
  state_ = State::kRunning;
  failed_ = false;
  // In the first one there are the keys of torchrun's nodes.
  if (attempt_ > 0) store_.clear();
  if (!options_.agent_store) workers_port_ = MasterPort::hold(0);
  std::map<int, TorchrunRole> all = torchrun_nodes_;
  for (const auto& [rank, node] : nodes_) all[rank] = {node->role, rank, node->nproc};
  int world_size = 0;
  std::map<std::string, int> role_sizes;
  for (const auto& [rank, role] : all) {
    world_size += role.nproc;
    role_sizes[role.role] += role.nproc;
  }
  int rank_base = 0;
  std::map<std::string, int> role_bases;
  for (const auto& [rank, role] : all) {
    start_node(rank, {rank_base, world_size, role_bases[role.role], role_sizes[role.role]});
    rank_base += role.nproc;
    role_bases[role.role] += role.nproc;
  }
}

void Coordinator::start_node(int rank, const AssignedRanks& ranks) {
  if (torchrun_nodes_.count(rank) > 0) {
    store_.set(torchrun_keys_.assigned_ranks(rank), ranks.json().dump());
    return;
  }
  Node& node = *nodes_.at(rank);
  node.ended = false;
  node.link.send({{"type", "start"},
                  {"attempt", attempt_},
                  {"node", rank},
                  {"ranks", ranks.json()},
                  {"master_addr", options_.master_addr},
                  {"master_port", workers_port_ ? workers_port_->port() : options_.master_port},
                  {"agent_store", options_.agent_store}});
  watch(node);
}

void Coordinator::fail(int exit_code, bool may_restart, const std::string& text) {
  if (std::exchange(failed_, true)) return;  // what follows from the first failure
  exit_code_ = exit_code;
  may_restart_ = may_restart && attempt_ < options_.max_restarts && torchrun_nodes_.empty();
  failure_text_ = text;
  send_to_all({{"type", "stop"}, {"attempt", attempt_}, {"what", text}});
}

void Coordinator::end_attempt() {
  if (!failed_ && !torchrun_nodes_.empty()) return enter_torchruns_barrier();
  if (!failed_) return finish(base::kExitOk, "");
  if (!may_restart_ || !all_here()) return finish(exit_code_, failure_text_);
  ++attempt_;
  start_attempt();
}

void Coordinator::finish(int exit_code, const std::string& text) {
  state_ = State::kFinished;
  send_to_all({{"type", "finish"}, {"exit_code", exit_code}, {"what", text}});
}

void Coordinator::send_to_all(const Json& message) {
  for (const auto& [rank, node] : nodes_) {
    node->link.send(message);
    watch(*node);
  }
}

}  // namespace syncbn::launch
