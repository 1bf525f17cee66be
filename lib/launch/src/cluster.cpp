#include "cluster.h"

#include <fmt/format.h>
#include <poll.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kRetryPeriod{200};

// torch's variable.
bool shares_store() {
  return base::env("TORCH_DISABLE_SHARE_RDZV_TCP_STORE").value_or("0") != "1";
}

void set_watch(int epoll, int operation, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  ::epoll_ctl(epoll, operation, fd, &event);
}

}  // namespace

Cluster::Cluster(const LaunchOptions& options, int master_port, base::UniqueFd listener)
    : options_(options),
      host_(listener ? "127.0.0.1" : options.master_addr),
      port_(master_port),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      join_deadline_(Clock::now() + options.join_timeout),
      next_try_(Clock::now()),
      next_notice_(Clock::now() + AgentLink::kNoticePeriod),
      next_alive_(Clock::now() + AgentLink::kAlivePeriod),
      heard_(Clock::now()) {
  if (!epoll_) base::throw_errno("epoll_create1");
  if (!listener) return;
  coordinator_ =
      std::make_unique<Coordinator>(Coordinator::Options{.run_id = options.run_id,
                                                         .nodes = options.nnodes.max,
                                                         .max_restarts = options.max_restarts,
                                                         .master_addr = options.master_addr,
                                                         .master_port = master_port,
                                                         .agent_store = shares_store(),
                                                         .join_timeout = options.join_timeout},
                                    std::move(listener));
  set_watch(epoll_.get(), EPOLL_CTL_ADD, coordinator_->fd(), EPOLLIN);
}

Cluster::~Cluster() = default;

Cluster::Clock::time_point Cluster::due() const {
  if (torchrun_) return Clock::now() + AgentLink::kNoticePeriod;  // only its store has news
  auto due = next_alive_;
  if (next_try_) due = std::min(due, *next_try_);
  if (!accepted_) due = std::min(due, next_notice_);
  if (coordinator_) due = std::min(due, coordinator_->due());
  return due;
}

void Cluster::handle() {
  const auto now = Clock::now();
  if (coordinator_) coordinator_->handle();
  if (finish_) return;
  if (torchrun_) return handle_torchrun();
  if (connecting_) finish_connecting();
  if (next_try_ && now >= *next_try_) connect();
  if (link_) handle_messages();
  if (!link_ && !torchrun_ && now >= join_deadline_) {
    end(base::kExitUnavailable,
        fmt::format(
            "node 0 did not answer at {}:{} within {} ({}); is syncbn-launch running "
            "there with --node_rank=0?",
            options_.master_addr, port_,
            base::format_seconds(std::chrono::duration<double>(options_.join_timeout).count()),
            connect_error_));
  }
  if (!link_ && !torchrun_ && now >= next_notice_) {
    next_notice_ = now + AgentLink::kNoticePeriod;
    notices_.push_back(fmt::format("waiting for node 0 at {}:{} ({})", options_.master_addr, port_,
                                   connect_error_));
  }
  if (link_ && now >= next_alive_) send({{"type", "alive"}});
  if (now >= next_alive_) next_alive_ = now + AgentLink::kAlivePeriod;
  if (link_ && !finish_ && (link_->closed() || now - heard_ > AgentLink::kSilence))
    lose_coordinator();
}

void Cluster::connect() {
  next_try_ = Clock::now() + kRetryPeriod;
  const base::AddressList found = base::resolve(host_, port_, connect_error_);
  if (!found) return;
  connecting_ = base::start_connect(*found);
  if (!connecting_) {
    connect_error_ = std::strerror(errno);
    return;
  }
  set_watch(epoll_.get(), EPOLL_CTL_ADD, connecting_.get(), EPOLLOUT);
  // A host that drops packets is tried again by the kernel.
  next_try_.reset();
  finish_connecting();
}

void Cluster::finish_connecting() {
  if (!base::poll_until(connecting_.get(), POLLOUT, Clock::now())) return;
  if (const int error = base::connect_error(connecting_.get()); error != 0) {
    connect_error_ = std::strerror(error);
    connecting_.reset();
    next_try_ = Clock::now() + kRetryPeriod;
    return;
  }
  link_.emplace(std::move(connecting_));
  heard_ = Clock::now();
  say_hello();
}

void Cluster::say_hello() {
  link_->send_text(AgentLink::kGreeting);
  link_->send({{"type", "hello"},
               {"job", options_.run_id},
               {"node", options_.node_rank},
               {"nodes", options_.nnodes.max},
               {"nproc", options_.nproc_per_node},
               {"role", options_.role},
               {"host", options_.local_addr.empty() ? base::hostname() : options_.local_addr},
               {"max_restarts", options_.max_restarts},
               {"auth", ""}});
  watch();
}

void Cluster::send(const Json& message) {
  if (!link_) return;
  link_->send(message);
  watch();
}

void Cluster::watch() {
  set_watch(epoll_.get(), EPOLL_CTL_MOD, link_->fd(),
            EPOLLIN | (link_->wants_to_write() ? EPOLLOUT : 0U));
}

void Cluster::handle_messages() {
  link_->handle();
  while (const auto message = link_->next()) {
    heard_ = Clock::now();
    accepted_ = true;
    handle_message(*message);
  }
  watch();
}

void Cluster::handle_message(const Json& message) {
  const std::string type = message.at("type");
  if (type == "refuse") end(message.at("exit_code"), message.at("message"));
  if (type == "waiting") notices_.push_back(message.at("message"));
  if (type == "finish") end(message.at("exit_code"), message.at("what"));
  if (type == "stop" && message.at("attempt") == attempt_) stop_reason_ = message.at("what");
  if (type == "start") {
    attempt_ = message.at("attempt");
    stop_reason_.clear();
    start_ = Start{.attempt = attempt_,
                   .node = message.at("node"),
                   .ranks = AssignedRanks::parse(message.at("ranks")).value(),
                   .master_addr = message.at("master_addr"),
                   .master_port = message.at("master_port"),
                   .agent_store = message.at("agent_store")};
  }
}

// Its store closes a connection that begins with our greeting.
bool Cluster::find_torchrun() {
  if (coordinator_ || options_.node_rank < 1) return false;
  try {
    torchrun_.emplace(StoreClient::connect(host_, port_, Clock::now() + seconds(2)), options_);
  } catch (const base::UnavailableError&) {
    return false;
  }
  set_watch(epoll_.get(), EPOLL_CTL_ADD, torchrun_->fd(), EPOLLIN);
  link_.reset();
  notices_.push_back(
      fmt::format("torchrun runs node 0 at {}:{}: no restarts, and failures there "
                  "show as lost connections here",
                  options_.master_addr, port_));
  return true;
}

void Cluster::handle_torchrun() {
  try {
    if (torchrun_state_ == TorchrunState::kJoining) {
      const auto ranks = torchrun_->ranks();
      if (!ranks) return;
      start_ = Start{.node = options_.node_rank,
                     .ranks = *ranks,
                     .master_addr = options_.master_addr,
                     .master_port = port_,
                     .agent_store = shares_store()};
      torchrun_state_ = TorchrunState::kRunning;
    } else if (torchrun_state_ == TorchrunState::kLeaving && torchrun_->all_have_left()) {
      end(base::kExitOk, "");
    }
  } catch (const base::UnavailableError& error) {
    // Its agent closes the store as soon as it has left the barrier itself, often before it has
    // answered the others. torchrun, too, takes that for a success.
    const bool left = torchrun_state_ == TorchrunState::kLeaving;
    end(left ? base::kExitOk : base::kExitUnavailable,
        fmt::format("torchrun's node 0 is gone: {}", error.what()));
  }
}

void Cluster::lose_coordinator() {
  if (!accepted_ && find_torchrun()) return;
  const std::string why =
      accepted_ ? "is gone"
                : "closed the connection; is that a syncbn-launch of this job, with --node_rank=0?";
  end(base::kExitUnavailable, fmt::format("node 0 at {}:{} {}", options_.master_addr, port_, why));
}

void Cluster::end(int exit_code, const std::string& what) {
  if (!finish_) finish_ = Finish{exit_code, what};
  // Also where workers still run.
  if (stop_reason_.empty()) stop_reason_ = what;
}

std::optional<Cluster::Start> Cluster::take_start() {
  return std::exchange(start_, std::nullopt);
}

std::vector<std::string> Cluster::take_notices() {
  return std::exchange(notices_, {});
}

void Cluster::report_failure(int exit_code, bool may_restart, const std::string& what) {
  if (torchrun_) return end(exit_code, what);
  send({{"type", "failed"},
        {"attempt", attempt_},
        {"exit_code", exit_code},
        {"may_restart", may_restart},
        {"what", what}});
}

void Cluster::report_end() {
  if (torchrun_ && !finish_) {
    torchrun_state_ = TorchrunState::kLeaving;
    try {
      torchrun_->leave();
    } catch (const base::UnavailableError& error) {
      end(base::kExitUnavailable, fmt::format("torchrun's node 0 is gone: {}", error.what()));
    }
    return;
  }
  send({{"type", "ended"}, {"attempt", attempt_}});
}

}  // namespace syncbn::launch
