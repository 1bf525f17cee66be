#include "nodes/tcp_link.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/signal_mask.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "common/json_messages.h"
#include "nodes/master_port.h"
#include "nodes/peers.h"

namespace syncbn::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kRetryPeriod{200};
// How often node 0 may close the connection before it has answered.
constexpr int kMaxDropped = 4;
constexpr seconds kResolvePeriod{1};
// Time limit for a connection attempt if the host has several addresses.
constexpr seconds kAddressPatience{2};
// Time for node 0 to open its port again after --preflight.
constexpr seconds kReopenPatience{10};
// Time limit for reporting to node 0 that this node cannot start. Otherwise node 0 waits for this
// node until its --join_timeout.
constexpr seconds kReportTimeout{10};
// Upper bound on the wait for an answer from torchrun's store in place of node 0's launcher.
constexpr seconds kStorePatience{30};

}  // namespace

TcpLink::TcpLink(const LaunchOptions& options, int master_port)
    : options_(options),
      port_(master_port),
      handshake_(Handshake::Side::kClient, options.token),
      join_deadline_(Clock::now() + options.join_timeout),
      next_alive_(Clock::now() + options.alive_period),
      alive_period_(options.alive_period),
      silence_(options.silence()),
      reopened_by_(Clock::now() + kReopenPatience) {}

Clock::time_point TcpLink::due() const {
  if (finish()) return Clock::time_point::max();
  auto due = next_alive_;
  if (next_try_) due = std::min(due, *next_try_);
  return accepted_ ? due : std::min(due, next_notice_);
}

void TcpLink::handle() {
  const auto now = Clock::now();
  if (finish()) return;
  if (connecting_) finish_connecting();
  if (next_try_ && now >= *next_try_) connect();
  if (link_) handle_messages();
  const bool waits = !accepted_ && !finish();
  if (waits && now >= join_deadline_) {
    end(base::kExitUnavailable,
        fmt::format("node 0 did not answer at {}:{} within {} ({}); is syncbn-launch running "
                    "there with --node_rank=0?",
                    options_.master_addr, port_, base::format_seconds(options_.join_timeout),
                    connect_error_));
  }
  if (waits && now >= next_notice_) {
    next_notice_ = now + JobLeader::kNoticePeriod;
    say(fmt::format("waiting for node 0 at {}:{} ({})", options_.master_addr, port_,
                    connect_error_));
  }
  if (link_ && handshake_.is_done() && now >= next_alive_) send(Alive{});
  if (now >= next_alive_) next_alive_ = now + alive_period_;
  if (!link_ || finish()) return;
  // Until node 0 has accepted this launcher, only the join deadline ends the wait. `now` dates from
  // before the messages were read: if this process waited for a core, unread messages are not
  // silence.
  const bool silent = accepted_ && !paused_ && now - heard_ > silence_;
  if (link_->has_ended() || silent) lose_coordinator();
}

void TcpLink::connect() {
  connecting_.reset();
  base::AddressList found =
      base::resolve(options_.master_addr, port_, connect_error_, AI_NUMERICHOST);
  if (!found) {
    const base::SignalMask unblocked = interruptible();
    found = base::resolve(options_.master_addr, port_, connect_error_);
  }
  if (!found) {
    next_try_ = Clock::now() + kResolvePeriod;
    if (std::exchange(resolve_error_said_, true)) return;
    say(fmt::format("cannot find {}: {}; trying again", options_.master_addr, connect_error_));
    return;
  }
  std::vector<const addrinfo*> addresses;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    addresses.push_back(one);
  }
  // With a single address the kernel retries.
  next_try_.reset();
  if (addresses.size() > 1) next_try_ = Clock::now() + kAddressPatience;
  connect_error_ = "no answer";
  connecting_ = base::start_connect(*addresses[next_address_++ % addresses.size()]);
  if (!connecting_ || !watched_.try_add(connecting_.get(), EPOLLOUT)) {
    connect_error_ = base::describe_errno(errno);
    connecting_.reset();
    next_try_ = Clock::now() + kRetryPeriod;
    return;
  }
  finish_connecting();
}

void TcpLink::finish_connecting() {
  if (!base::poll_until(connecting_.get(), POLLOUT, Clock::now())) return;
  if (const int error = base::connect_error(connecting_.get()); error != 0) {
    connect_error_ = base::describe_errno(error);
    connecting_.reset();
    next_try_ = Clock::now() + kRetryPeriod;
    return;
  }
  next_try_.reset();
  connect_error_ = "no answer to our greeting";
  link_.emplace(std::move(connecting_));
  base::detect_lost_host(link_->fd());
  heard_ = Clock::now();
  handshake_ = Handshake(Handshake::Side::kClient, options_.token);
  link_->send(handshake_.begin());
  protection_.reset();
  if (handshake_.is_done()) send_hello();
}

void TcpLink::send_hello() {
  send(Hello{.job = options_.run_id,
             .node = options_.node_rank,
             .nodes = options_.nnodes.str(),
             .nproc = options_.nproc_per_node,
             .role = options_.role,
             .host = own_name(options_),
             .max_restarts = options_.max_restarts,
             .exit_code = no_start_ ? no_start_->exit_code : 0,
             .what = no_start_ ? no_start_->message : "",
             .addresses = options_.token.empty() ? std::vector<std::string>() : own_addresses()});
}

void TcpLink::send(const FromNode& message) {
  constexpr size_t kFrame = 200;           // bytes of the rest of the message
  if (!accepted_ || !link_ || finish()) {  // the client of `status` must not wait
    if (std::holds_alternative<AskAllRecords>(message)) return add(AllRecords{});
    if (std::holds_alternative<AskStatus>(message)) return add(Status{});
  }
  if (!link_) return;
  const auto* const all = std::get_if<Workers>(&message);
  const std::string line =
      all == nullptr
          ? message_line(message)
          : message_line(FromNode(Workers{shortened(all->workers, Peers::kMaxMessage - kFrame)}));
  send_line(*link_, line, protection_.get());
  watch();
}

void TcpLink::watch() {
  watched_.change(link_->fd(), static_cast<uint32_t>(link_->events()));
}

void TcpLink::handle_messages() {
  link_->flush();
  link_->receive();
  shake_hands();
  while (!finish() && handshake_.is_done()) {
    const auto message = next_message(*link_, SIZE_MAX, protection_.get());
    if (!message) break;
    heard_ = Clock::now();
    accepted_ = true;
    try {
      const auto known = message_in<ToNode>(*message);
      paused_ = std::holds_alternative<Pause>(known);
      handle_message(known);
    } catch (const nlohmann::json::exception& error) {
      return end(
          base::kExitUnavailable,
          fmt::format("node 0 at {}:{} sent an invalid message ({}); is that a syncbn-launch "
                      "of this version?",
                      options_.master_addr, port_, error.what()));
    }
  }
  if (!finish()) watch();
}

void TcpLink::shake_hands() {
  if (handshake_.is_done()) return;
  if (handshake_.advance(*link_)) {
    protection_ = handshake_.protection();
    return send_hello();
  }
  if (handshake_.failure().empty()) return;
  end(base::kExitUsage,
      fmt::format("node 0 at {}:{} and this launcher do not agree on the job's token: {}",
                  options_.master_addr, port_, handshake_.failure()));
}

void TcpLink::handle_message(const ToNode& message) {
  if (const auto* const welcome = std::get_if<Welcome>(&message)) {
    alive_period_ = milliseconds(welcome->alive_ms);
    silence_ = milliseconds(welcome->silence_ms);
    next_alive_ = Clock::now();
  } else if (const auto* const refusal = std::get_if<Refuse>(&message)) {
    end(refusal->exit_code, fmt::format("node 0 at {}:{} refused this launcher: {}",
                                        options_.master_addr, port_, refusal->message));
  } else if (const auto* const finish = std::get_if<Finish>(&message)) {
    end(*finish);
  } else {
    add(message);
  }
}

// torchrun's store closes a connection that begins with our greeting, and sends nothing.
bool TcpLink::find_torchrun() {
  if (options_.node_rank < 1 || !options_.token.empty()) return false;
  const base::SignalMask unblocked = interruptible();
  try {
    // No retry: a store that opens this port later belongs to a new node 0, perhaps a
    // syncbn-launch.
    torchrun_ = std::make_unique<TorchrunLink>(
        StoreClient::connect(options_.master_addr, port_, Clock::now() + kStorePatience,
                             StoreClient::Retry::kNever),
        options_, port_);
  } catch (const base::UnavailableError&) {
    return false;
  }
  link_.reset();
  return true;
}

void TcpLink::lose_coordinator() {
  const bool is_bad = link_->error() == EBADMSG;
  // After the check of --preflight, node 0 closes its port and opens it again.
  const bool is_checked = options_.preflight && Clock::now() < reopened_by_;
  if (!accepted_ && !is_bad && !is_checked && !no_start_ && find_torchrun()) return;
  // Node 0 also drops newcomers when it has too many.
  if (!accepted_ && !is_bad && (is_checked || ++times_dropped_ <= kMaxDropped)) {
    link_.reset();
    connect_error_ = "closed the connection";
    next_try_ = Clock::now() + kRetryPeriod;
    return;
  }
  const bool is_lost = accepted_ || link_->error() == ETIMEDOUT;  // detect_lost_host()
  std::string why = is_lost ? "is gone" : "closed the connection";
  if (is_bad) why = fmt::format("sent {}", kBadMessage);
  if (!accepted_) why += "; is that a syncbn-launch of this job, with --node_rank=0?";
  end(base::kExitUnavailable, fmt::format("node 0 at {}:{} {}", options_.master_addr, port_, why));
  // A node 0 that was only stopped must not read later that our workers have ended: it would take
  // that for success and go on without them.
  link_.reset();
}

void TcpLink::end(const JobFailure& failure) {
  NodeLink::end(failure);
  // Messages are no longer read, so they would wake the poll loop forever.
  for (const int fd : {link_ ? link_->fd() : -1, connecting_ ? connecting_.get() : -1}) {
    if (fd >= 0) watched_.remove(fd);
  }
}

void TcpLink::report_signal(const JobFailure& end) {
  if (!options_.nodes_may_change()) return NodeLink::report_signal(end);
  left_by_signal_ = end;
  send(Leave{});
}

void TcpLink::report_no_start(int exit_code, const std::string& what) {
  no_start_ = Refuse{exit_code, what};
  const auto deadline = std::min(join_deadline_, Clock::now() + kReportTimeout);
  while (!finish() && Clock::now() < deadline) {
    base::poll_until(fd(), POLLIN, std::min(due(), deadline));
    handle();
  }
}

void TcpLink::report_end(int attempt) {
  NodeLink::report_end(attempt);
  if (left_by_signal_) end(*left_by_signal_);
}

}  // namespace syncbn::launch
