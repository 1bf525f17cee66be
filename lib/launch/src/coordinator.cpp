#include "coordinator.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "hosts.h"

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;

// For agents of torchrun, between the last one's arrival in the barrier and their end.
constexpr std::chrono::seconds kBarrierPatience{5};

}  // namespace

/// What a launcher says of itself.
struct Coordinator::Hello {
  std::string job;
  int node = -1;  ///< -1: any
  bool leads = false;
  std::string nodes;
  int nproc = 0;
  std::string role;
  std::string host;
  int max_restarts = 0;

  static Hello parse(const Json& message) {
    return {message.at("job"),   message.at("node"),        message.at("leads"),
            message.at("nodes"), message.at("nproc"),       message.at("role"),
            message.at("host"),  message.at("max_restarts")};
  }
};

struct Coordinator::Node {
  Node(base::UniqueFd socket, std::string first_bytes)
      : link(std::move(socket), std::move(first_bytes)) {}

  AgentLink link;
  bool greeted = false;
  int rank = -1;  ///< of the node
  int nproc = 0;
  std::string host;
  std::string role;
  bool takes_part = false;  ///< in this attempt
  bool ended = false;       ///< its workers, in this attempt
  bool leaving = false;     ///< it ends, and the others do not
  bool paused = false;      ///< stopped, as by Ctrl-Z
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
      next_alive_(Clock::now() + options_.alive_period) {
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
  if (state_ == State::kJoining && options_.knows_ranks) find_torchrun_nodes();
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

bool Coordinator::is_gone(const Node& node) const {
  if (node.link.closed() || (node.leaving && (node.ended || !node.takes_part))) return true;
  // The end of the job does not wait until somebody continues it.
  const bool may_be_silent = node.paused && !failed_;
  return !may_be_silent && Clock::now() - node.heard > options_.silence;
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
    node.paused = false;
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
  if (type == "hello") hello(node, Hello::parse(message));
  if (node.rank < 0) return;
  if (type == "failed") failed(node, message);
  if (type == "end") {
    end_job(message.at("exit_code"),
            fmt::format("{}: {}", node.name(), message.at("what").get<std::string>()));
  }
  if (type == "leave") leave(node);
  if (type == "ended") ended(node, message);
  if (type == "pause") node.paused = true;
}

void Coordinator::hello(Node& node, const Hello& hello) {
  const std::string why = misfit(node, hello);
  if (!why.empty()) {
    node.link.send({{"type", "refuse"}, {"exit_code", base::kExitUsage}, {"message", why}});
    if (state_ == State::kJoining) notices_.push_back("turned a launcher away: " + why);
    return;
  }
  node.rank = rank_for(hello.node, hello.leads);
  node.nproc = hello.nproc;
  node.role = hello.role;
  node.host = hello.host;
  const auto self = std::find_if(newcomers_.begin(), newcomers_.end(),
                                 [&](const auto& one) { return one.get() == &node; });
  nodes_[node.rank] = std::move(*self);
  newcomers_.erase(self);
  welcome(node);
}

void Coordinator::welcome(Node& node) {
  node.link.send({{"type", "welcome"},
                  {"alive_ms", options_.alive_period.count()},
                  {"silence_ms", options_.silence.count()}});
  if (state_ == State::kFinished) return send_finish(node);
  if (state_ == State::kJoining) return start_when_complete();
  if (failed_ || !node_change_.empty()) return;  // the next attempt takes it along
  const bool about_to_end =
      std::any_of(nodes_.begin(), nodes_.end(), [](const auto& one) { return one.second->ended; });
  if (about_to_end || taking_part() >= options_.nodes.max) {
    node.link.send({{"type", "waiting"},
                    {"message", fmt::format("the job runs on {} nodes without this one, which "
                                            "stands by",
                                            taking_part())}});
    return;
  }
  change_nodes(node.name() + " has come");
}

int Coordinator::rank_for(int wanted, bool leads) const {
  if (wanted >= 0) return wanted;
  // Rank 0 writes the job's files, and is where the store is.
  int rank = leads ? 0 : 1;
  while (is_here(rank)) ++rank;
  return rank;
}

std::string Coordinator::misfit(const Node& node, const Hello& hello) const {
  if (node.rank >= 0) return "a launcher said hello twice";
  if (hello.job != options_.run_id) {
    return fmt::format("{} belongs to job '{}' (--rdzv_id), and the job at {}:{} is '{}'",
                       hello.host, hello.job, options_.master_addr, options_.master_port,
                       options_.run_id);
  }
  const std::string nodes = options_.nodes.str();
  if (hello.nodes != nodes) {
    return fmt::format("{} was started with --nnodes={}, and node 0 with --nnodes={}", hello.host,
                       hello.nodes, nodes);
  }
  if (hello.max_restarts != options_.max_restarts) {
    return fmt::format("{} was started with --max_restarts={}, and node 0 with --max_restarts={}",
                       hello.host, hello.max_restarts, options_.max_restarts);
  }
  if (hello.node >= options_.nodes.max || hello.nproc < 1 || hello.nproc > kMostWorkers) {
    return fmt::format("{} says that it is node {} with {} workers", hello.host, hello.node,
                       hello.nproc);
  }
  if (const auto other = nodes_.find(hello.node); other != nodes_.end()) {
    return fmt::format("two launchers have --node_rank={}: one on {} and one on {}", hello.node,
                       other->second->host, hello.host);
  }
  if (torchrun_nodes_.count(hello.node) > 0) {
    return fmt::format("{} has --node_rank={}, and so has a torchrun of this job", hello.host,
                       hello.node);
  }
  const bool has_begun = state_ == State::kRunning || state_ == State::kLeaving;
  if (has_begun && !options_.nodes_may_change) return "the job has begun without this launcher";
  return "";
}

void Coordinator::failed(Node& node, const Json& message) {
  if (message.at("attempt") != attempt_) return;
  fail(message.at("exit_code"), message.at("may_restart"),
       fmt::format("{}: {}", node.name(), message.at("what").get<std::string>()), node.rank);
}

void Coordinator::end_job(int exit_code, const std::string& text) {
  // No workers run.
  if (state_ == State::kJoining || state_ == State::kLeaving) return finish(exit_code, text);
  node_change_.clear();
  if (failed_ && may_restart_) {
    // The failure alone would not have ended the job.
    exit_code_ = exit_code;
    failure_text_ = text;
    failed_node_ = kNoNode;
  }
  fail(exit_code, false, text);
  over_ = true;
  may_restart_ = false;
}

void Coordinator::pause() {
  send_to_all({{"type", "pause"}});
}

void Coordinator::leave(Node& node) {
  node.leaving = true;
  if (node.takes_part && !failed_) change_nodes(node.name() + " leaves");
}

void Coordinator::ended(Node& node, const Json& message) {
  if (message.at("attempt") != attempt_) return;
  node.ended = true;
  if (state_ == State::kRunning && all_ended()) end_attempt();
}

void Coordinator::lost(Node& node) {
  const std::string name = node.name();
  const bool takes_part = node.takes_part;
  const bool has_left = node.leaving || node.ended;
  nodes_.erase(node.rank);
  // One that joins may come again.
  if (state_ == State::kJoining) return start_when_complete();
  if (state_ != State::kRunning || !takes_part) return;
  // Its workers are dead, or its keeper sees to that. If they have ended well, nothing is lost.
  if (!has_left && options_.nodes_may_change) change_nodes(name + " is lost");
  if (!has_left && !options_.nodes_may_change) {
    fail(base::kExitUnavailable, false, fmt::format("the launcher of {} is gone", name));
  }
  if (all_ended()) end_attempt();
}

void Coordinator::find_torchrun_nodes() {
  for (int node = 0; node < options_.nodes.max; ++node) {
    if (is_here(node)) continue;
    const auto text = store_.get(torchrun_keys_.role_info(node));
    if (!text) continue;
    const auto role = TorchrunRole::parse(*text);
    if (!role || role->node != node || role->nproc < 1 || role->nproc > kMostWorkers) continue;
    torchrun_nodes_[node] = *role;
  }
  start_when_complete();
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
  const bool all_in = store_.get(torchrun_keys_.members()) == std::to_string(options_.nodes.max);
  if (all_in && !barrier_deadline_) {
    store_.set(torchrun_keys_.last_member(), "all are here");
    barrier_deadline_ = Clock::now() + kBarrierPatience;
  }
  // They still read from the store.
  if (store_.clients() > 0 && !(barrier_deadline_ && Clock::now() >= *barrier_deadline_)) return;
  if (all_in) return finish(base::kExitOk, "");
  finish(base::kExitUnavailable, "a node that torchrun runs left before its workers had succeeded");
}

void Coordinator::handle_times() {
  const auto now = Clock::now();
  if (state_ == State::kJoining && last_call_ && now >= *last_call_) start_attempt();
  if (state_ == State::kJoining && !last_call_ && now >= join_deadline_) {
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
    next_alive_ = now + options_.alive_period;
    send_to_all({{"type", "alive"}});
  }
  due_ = next_alive_;
  if (state_ == State::kLeaving && barrier_deadline_) due_ = std::min(due_, *barrier_deadline_);
  if (state_ != State::kJoining) return;
  due_ = std::min({due_, next_notice_, last_call_.value_or(join_deadline_)});
}

std::string Coordinator::missing() const {
  const auto plural = [](int count) { return count == 1 ? "" : "s"; };
  if (!options_.knows_ranks) {
    const int here = present();
    const int wanted = last_call_ ? options_.nodes.max : options_.nodes.min;
    return fmt::format("{} more node{} ({} here, --nnodes={})", wanted - here,
                       plural(wanted - here), here, options_.nodes.str());
  }
  std::vector<std::string> names;
  for (int rank = 0; rank < options_.nodes.max; ++rank) {
    if (!is_here(rank)) names.push_back(std::to_string(rank));
  }
  constexpr size_t kNamed = 16;
  const char* const ending = plural(static_cast<int>(names.size()));
  std::string rest;
  if (names.size() > kNamed) {
    rest = fmt::format(" and {} more", names.size() - kNamed);
    names.resize(kNamed);
  }
  return fmt::format("node{} {}{}", ending, base::join(names, ", "), rest);
}

int Coordinator::present() const {
  const auto leaving = std::count_if(nodes_.begin(), nodes_.end(),
                                     [](const auto& one) { return one.second->leaving; });
  return static_cast<int>(nodes_.size() + torchrun_nodes_.size()) - static_cast<int>(leaving);
}

int Coordinator::taking_part() const {
  const auto ours = std::count_if(nodes_.begin(), nodes_.end(),
                                  [](const auto& one) { return one.second->takes_part; });
  return static_cast<int>(ours) + static_cast<int>(torchrun_nodes_.size());
}

bool Coordinator::all_ended() const {
  return std::all_of(nodes_.begin(), nodes_.end(),
                     [](const auto& one) { return one.second->ended || !one.second->takes_part; });
}

void Coordinator::start_when_complete() {
  const int here = present();
  if (here >= options_.nodes.max) return start_attempt();
  if (here < options_.nodes.min) return last_call_.reset();
  if (!last_call_) last_call_ = Clock::now() + options_.last_call;
}

void Coordinator::choose_nodes() {
  int room = options_.nodes.max - static_cast<int>(torchrun_nodes_.size());
  // Those that took part stay; a newcomer may have got the rank of one that is lost.
  for (const bool took_part : {true, false}) {
    for (const auto& [rank, node] : nodes_) {
      if (node->takes_part != took_part) continue;
      node->takes_part = !node->leaving && room > 0;
      if (node->takes_part) --room;
    }
  }
}

void Coordinator::start_attempt() {
  state_ = State::kRunning;
  failed_ = false;
  node_change_.clear();
  last_call_.reset();
  choose_nodes();
  // In the first one there are the keys of torchrun's nodes.
  if (attempt_ > 0) store_.clear();
  if (!options_.agent_store) workers_port_ = MasterPort::hold(0);
  std::map<int, TorchrunRole> all = torchrun_nodes_;
  for (const auto& [rank, node] : nodes_) {
    if (node->takes_part) all[rank] = {node->role, rank, node->nproc};
  }
  int world_size = 0;
  std::map<std::string, int> role_sizes;
  for (const auto& [rank, role] : all) {
    world_size += role.nproc;
    role_sizes[role.role] += role.nproc;
  }
  int index = 0;
  int rank_base = 0;
  std::map<std::string, int> role_bases;
  for (const auto& [rank, role] : all) {
    start_node(rank, index++,
               {rank_base, world_size, role_bases[role.role], role_sizes[role.role]});
    rank_base += role.nproc;
    role_bases[role.role] += role.nproc;
  }
}

void Coordinator::start_node(int rank, int index, const AssignedRanks& ranks) {
  if (torchrun_nodes_.count(rank) > 0) {
    store_.set(torchrun_keys_.assigned_ranks(rank), ranks.json().dump());
    return;
  }
  Node& node = *nodes_.at(rank);
  node.ended = false;
  node.link.send({{"type", "start"},
                  {"attempt", attempt_},
                  {"restarts", restarts_},
                  {"reason", reason_},
                  {"job_id", options_.job_id},
                  {"node", index},
                  {"nodes", taking_part()},
                  {"ranks", ranks.json()},
                  {"master_addr", options_.master_addr},
                  {"master_port", workers_port_ ? workers_port_->port() : options_.master_port},
                  {"agent_store", options_.agent_store}});
  watch(node);
}

void Coordinator::change_nodes(const std::string& text) {
  if (state_ != State::kRunning || over_ || !node_change_.empty()) return;
  // Workers often notice sooner than we do that a node is lost, and fail.
  node_change_ = text;
  if (!failed_) stop_attempt(text);
}

void Coordinator::fail(int exit_code, bool may_restart, const std::string& text, int node) {
  // What follows from the first failure, or from the end of workers elsewhere.
  if (failed_ || !node_change_.empty()) return;
  failed_ = true;
  exit_code_ = exit_code;
  may_restart_ = may_restart && restarts_ < options_.max_restarts && torchrun_nodes_.empty();
  failure_text_ = text;
  failed_node_ = node;
  stop_attempt(text);
}

void Coordinator::stop_attempt(const std::string& text) {
  send_to_all({{"type", "stop"}, {"attempt", attempt_}, {"what", text}});
}

void Coordinator::end_attempt() {
  if (!node_change_.empty()) return start_again(node_change_);
  if (!failed_ && !torchrun_nodes_.empty()) return enter_torchruns_barrier();
  if (!failed_) return finish(base::kExitOk, "");
  const bool can_restart = options_.nodes_may_change || present() == options_.nodes.max;
  if (!may_restart_ || !can_restart) return finish(exit_code_, failure_text_);
  ++restarts_;
  start_again(failure_text_);
}

void Coordinator::start_again(const std::string& reason) {
  ++attempt_;
  reason_ = reason;
  failed_node_ = kNoNode;
  state_ = State::kJoining;
  join_deadline_ = Clock::now() + options_.join_timeout;
  next_notice_ = Clock::now();
  // Those that are there have waited long enough.
  if (present() >= options_.nodes.min) start_attempt();
}

void Coordinator::finish(int exit_code, const std::string& text) {
  state_ = State::kFinished;
  exit_code_ = exit_code;
  failure_text_ = text;
  for (const auto& [rank, node] : nodes_) send_finish(*node);
}

void Coordinator::send_finish(Node& node) {
  node.link.send({{"type", "finish"},
                  {"exit_code", exit_code_},
                  {"what", failure_text_},
                  {"yours", node.rank == failed_node_}});
  watch(node);
}

void Coordinator::send_to_all(const Json& message) {
  for (const auto& [rank, node] : nodes_) {
    node->link.send(message);
    watch(*node);
  }
}

}  // namespace syncbn::launch
