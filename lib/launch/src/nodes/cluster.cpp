#include "nodes/cluster.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/signal_mask.h>
#include <syncbn/base/signal_name.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/json_messages.h"
#include "nodes/master_port.h"

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;
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

// For a blocking call while no workers run: lets these signals end this process.
base::SignalMask interruptible() {
  return {SIG_UNBLOCK, {SIGINT, SIGTERM, SIGHUP, SIGQUIT}};
}

// Where node 0 reaches its own coordinator.
std::string own_address(int listener) {
  const std::string address = base::peer_address(listener, /*own=*/true);
  return address == "::" || address == "0.0.0.0" ? "127.0.0.1" : address;
}

}  // namespace

Cluster::Cluster(const LaunchOptions& options, const std::string& job_id, int master_port,
                 base::UniqueFd listener)
    : options_(options),
      host_(listener ? own_address(listener.get()) : options.master_addr),
      port_(master_port),
      handshake_(Handshake::Side::kClient, options.token),
      join_deadline_(Clock::now() + options.join_timeout),
      next_try_(Clock::now()),
      next_notice_(Clock::now() + Coordinator::kNoticePeriod),
      next_alive_(Clock::now() + options.alive_period),
      heard_(Clock::now()),
      alive_period_(options.alive_period),
      silence_(options.silence()),
      reopened_by_(Clock::now() + kReopenPatience) {
  watched_.try_add(record_requests_.fd());
  if (!listener) return;
  if (!is_local_address(options.master_addr)) {
    // Not an error: others may reach it through a service or a router.
    notices_.push_back(
        fmt::format("--master_addr={} is not an address of this machine, which is node 0",
                    options.master_addr));
  }
  coordinator_ = std::make_unique<Coordinator>(options, job_id, master_port, std::move(listener));
  watched_.add(coordinator_->fd());
}

Cluster::Clock::time_point Cluster::due() const {
  if (finish_) return coordinator_ ? coordinator_->due() : Clock::time_point::max();
  if (torchrun_) return Clock::time_point::max();  // the store's answers wake handle()
  auto due = next_alive_;
  if (next_try_) due = std::min(due, *next_try_);
  if (!accepted_) due = std::min(due, next_notice_);
  if (coordinator_) due = std::min(due, coordinator_->due());
  return due;
}

void Cluster::handle() {
  const auto now = Clock::now();
  if (coordinator_) {
    coordinator_->handle();
    for (const std::string& notice : coordinator_->take_notices()) {
      notices_.push_back(base::printable(notice));  // may quote a foreign program
    }
  }
  handle_record_requests();
  if (finish_) return;
  if (torchrun_) return handle_torchrun();
  if (connecting_) finish_connecting();
  if (next_try_ && now >= *next_try_) connect();
  if (link_) handle_messages();
  const bool waits = !accepted_ && !finish_;
  if (waits && now >= join_deadline_) {
    end(base::kExitUnavailable,
        fmt::format("node 0 did not answer at {}:{} within {} ({}); is syncbn-launch running "
                    "there with --node_rank=0?",
                    options_.master_addr, port_, base::format_seconds(options_.join_timeout),
                    connect_error_));
  }
  if (waits && now >= next_notice_) {
    next_notice_ = now + Coordinator::kNoticePeriod;
    notices_.push_back(fmt::format("waiting for node 0 at {}:{} ({})", options_.master_addr, port_,
                                   connect_error_));
  }
  if (link_ && handshake_.is_done() && now >= next_alive_) send({{"type", "alive"}});
  if (now >= next_alive_) next_alive_ = now + alive_period_;
  if (!link_ || finish_) return;
  // Until node 0 has accepted this launcher, only the join deadline ends the wait. `now` dates from
  // before the messages were read: if this process waited for a core, unread messages are not
  // silence.
  const bool silent = accepted_ && !paused_ && now - heard_ > silence_;
  if (link_->has_ended() || silent) lose_coordinator();
}

void Cluster::connect() {
  connecting_.reset();
  base::AddressList found = base::resolve(host_, port_, connect_error_, AI_NUMERICHOST);
  if (!found) {
    const base::SignalMask unblocked = interruptible();
    found = base::resolve(host_, port_, connect_error_);
  }
  if (!found) {
    next_try_ = Clock::now() + kResolvePeriod;
    if (std::exchange(resolve_error_said_, true)) return;
    notices_.push_back(fmt::format("cannot find {}: {}; trying again", host_, connect_error_));
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

void Cluster::finish_connecting() {
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

void Cluster::send_hello() {
  Json hello =
      Hello{.job = options_.run_id,
            .node = options_.node_rank,
            .leads = coordinator_ != nullptr,
            .nodes = options_.nnodes.str(),
            .nproc = options_.nproc_per_node,
            .role = options_.role,
            .host = own_name(),
            .max_restarts = options_.max_restarts,
            .is_check = options_.is_check,
            .exit_code = no_start_ ? no_start_->exit_code : 0,
            .what = no_start_ ? no_start_->what : "",
            .addresses = options_.token.empty() ? std::vector<std::string>() : own_addresses()};
  hello["type"] = "hello";
  send(hello);
}

void Cluster::send(const Json& message) {
  if (!link_) return;
  send_message(*link_, message, protection_.get());
  watch();
}

void Cluster::watch() {
  watched_.change(link_->fd(), static_cast<uint32_t>(link_->events()));
}

void Cluster::handle_messages() {
  link_->flush();
  link_->receive();
  shake_hands();
  while (!finish_ && handshake_.is_done()) {
    const auto message = next_message(*link_, SIZE_MAX, protection_.get());
    if (!message) break;
    heard_ = Clock::now();
    accepted_ = true;
    paused_ = false;
    try {
      handle_message(*message);
    } catch (const Json::exception&) {
      return end(base::kExitUnavailable,
                 fmt::format("node 0 at {}:{} sent an invalid message; is that a syncbn-launch "
                             "of this version?",
                             options_.master_addr, port_));
    }
  }
  if (!finish_) watch();
}

void Cluster::handle_record_requests() {
  if (!record_requests_.handle()) return;
  if (accepted_ && link_ && !finish_) return send({{"type", "ask_all_records"}});
  record_requests_.answer("");
}

void Cluster::shake_hands() {
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

void Cluster::handle_message(const Json& message) {
  const std::string type = message.at("type");
  if (type == "welcome") {
    alive_period_ = milliseconds(message.at("alive_ms"));
    silence_ = milliseconds(message.at("silence_ms"));
    next_alive_ = Clock::now();
  }
  const auto text = [&message](const char* key) { return shown_text(message, key); };
  if (type == "refuse") {
    end(message.at("exit_code"), fmt::format("node 0 at {}:{} refused this launcher: {}",
                                             options_.master_addr, port_, text("message")));
  }
  if (type == "waiting") notices_.push_back(text("message"));
  if (type == "pause") paused_ = true;
  if (type == "finish") end(message.at("exit_code"), text("what"), message.at("yours"));
  if (type == "stop" && message.at("attempt") == attempt_) {
    stop_reason_ = text("what");
    stop_is_failure_ = message.at("failed").get<bool>();
  }
  if (type == "inquire") is_asked_ = true;
  if (type == "ask_records") {
    asks_for_records_ = true;
    record_question_ = message.at("question");
  }
  if (type == "record") job_records_.emplace(message.at("rank"), message.dump());
  if (type == "all_records") {
    const JobRecords records{message.get<FlightFile>(), std::exchange(job_records_, {})};
    record_requests_.answer(records.messages.empty() ? "" : records.text());
  }
  if (type == "hold") holds_ = true;
  if (type == "hang") hang_ = message.at("hang").get<Hang>();
  if (type == "status") status_ = message;
  if (type == "start") {
    hang_.reset();
    start_ = message.get<Assignment>();
    attempt_ = start_->attempt;
    stop_reason_.clear();
  }
}

// torchrun's store closes a connection that begins with our greeting, and sends nothing.
bool Cluster::find_torchrun() {
  if (coordinator_ || options_.node_rank < 1 || !options_.token.empty()) return false;
  const base::SignalMask unblocked = interruptible();
  try {
    // No retry: a store that opens this port later belongs to a new node 0, perhaps a
    // syncbn-launch.
    torchrun_.emplace(StoreClient::connect(host_, port_, Clock::now() + kStorePatience,
                                           StoreClient::Retry::kNever),
                      options_);
  } catch (const base::UnavailableError&) {
    return false;
  }
  if (!watched_.try_add(torchrun_->fd())) {
    torchrun_.reset();
    return false;
  }
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
      const base::SignalMask unblocked = interruptible();
      const auto ranks = torchrun_->ranks();
      if (!ranks) return;
      start_ = Assignment{.master_addr = options_.master_addr,
                          .master_port = port_,
                          .job_id = {},
                          .agent_store = shares_store(),
                          .node = options_.node_rank,
                          .nodes = options_.nnodes.max,
                          .ranks = *ranks};
      torchrun_state_ = TorchrunState::kRunning;
    } else if (torchrun_state_ == TorchrunState::kRunning) {
      torchrun_->check();
    } else if (torchrun_->all_have_left()) {
      end(base::kExitOk, "");
    }
  } catch (const base::UnavailableError& error) {
    // torchrun's agent closes the store when it leaves the barrier, perhaps before it has answered
    // all others. torchrun counts that as success as well.
    const bool left = torchrun_state_ == TorchrunState::kLeaving;
    end(left ? base::kExitOk : base::kExitUnavailable,
        fmt::format("torchrun's node 0 is gone: {}", error.what()));
  }
}

void Cluster::lose_coordinator() {
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

void Cluster::end(int exit_code, const std::string& what, bool is_ours) {
  if (!finish_) finish_ = Finish{exit_code, what, is_ours};
  if (stop_reason_.empty()) {  // workers may still run
    stop_reason_ = what;
    stop_is_failure_ = exit_code != base::kExitOk;
  }
  // Messages are no longer read, so they would wake the poll loop forever.
  for (const int fd : {link_ ? link_->fd() : -1, torchrun_ ? torchrun_->fd() : -1,
                       connecting_ ? connecting_.get() : -1}) {
    if (fd >= 0) watched_.remove(fd);
  }
}

void Cluster::report_failure(int exit_code, bool may_restart, const std::string& what,
                             const FailureCause& cause) {
  if (torchrun_) return end(exit_code, what, true);
  send({{"type", "failed"},
        {"attempt", attempt_},
        {"exit_code", exit_code},
        {"may_restart", may_restart},
        {"rank", cause.rank},
        {"status", cause.status},
        {"step", cause.step ? Json(*cause.step) : Json()},
        {"what", what}});
}

void Cluster::report_signal(int signal) {
  if (!coordinator_ && options_.nodes_may_change()) {
    left_by_signal_ = signal;
    return send({{"type", "leave"}});
  }
  const int exit_code = base::kExitSignalBase + signal;
  const std::string what = "ended by " + base::signal_name(signal);
  if (torchrun_) return end(exit_code, what);
  if (coordinator_) {
    // Over the link, another node's message could overtake it.
    return coordinator_->end_job(exit_code, fmt::format("node 0 ({}): {}", own_name(), what));
  }
  send({{"type", "end"}, {"exit_code", exit_code}, {"what", what}});
}

void Cluster::report_no_start(int exit_code, const std::string& what) {
  no_start_ = Finish{exit_code, what};
  const auto deadline = std::min(join_deadline_, Clock::now() + kReportTimeout);
  while (!finish_ && Clock::now() < deadline) {
    base::poll_until(fd(), POLLIN, std::min(due(), deadline));
    handle();
  }
}

void Cluster::report_end() {
  if (torchrun_ && !finish_) {
    torchrun_state_ = TorchrunState::kLeaving;
    const base::SignalMask unblocked = interruptible();
    try {
      torchrun_->leave();
    } catch (const base::UnavailableError& error) {
      end(base::kExitUnavailable, fmt::format("torchrun's node 0 is gone: {}", error.what()));
    }
    return;
  }
  send({{"type", "ended"}, {"attempt", attempt_}});
  if (left_by_signal_) end(base::kExitSignalBase + *left_by_signal_, "");
}

void Cluster::report_workers(const std::vector<WorkerState>& workers) {
  constexpr size_t kFrame = 200;  // bytes of the rest of the message
  send({{"type", "workers"}, {"workers", json_of(workers, Peers::kMaxMessage - kFrame)}});
}

void Cluster::report_record(const RankMemory& rank) {
  const auto record = rank.read();
  if (!record) return;
  if (auto message = record_message(*record, RecordQuota::of(record->world_size))) {
    (*message)["question"] = record_question_;
    send(*message);
  }
}

void Cluster::report_records() {
  send({{"type", "records"}, {"question", record_question_}});
}

void Cluster::report_stall(double seconds, bool ends) {
  send({{"type", "stalled"}, {"attempt", attempt_}, {"seconds", seconds}, {"ends", ends}});
}

void Cluster::pause() {
  if (coordinator_) coordinator_->pause();
  send({{"type", "pause"}});
}

}  // namespace syncbn::launch
