#include "store/store_server.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace syncbn::launch {
namespace {

using store::Query;
using store::QueryReader;
using store::QueryScanner;
using store::wire_key;

// Upper bound on the events that one call of handle() processes.
constexpr size_t kMaxEvents = 64;
// The server reads no further queries of a client that leaves this many bytes of answers unread.
constexpr size_t kMaxUnsent = size_t{1} << 20;
// Upper bound on the bytes that the server reads from a connection before it knows its protocol.
constexpr size_t kMaxGreeting = size_t{4} << 10;
// A client whose unfinished query and unread answers are smaller stays when the memory is used up.
constexpr size_t kFreeBuffer = size_t{64} << 10;

// Whether the store or the list of waiting clients may grow.
bool adds_to_store(std::string_view query) {
  constexpr std::array kAdding{Query::kSet,      Query::kCompareSet, Query::kAdd,  Query::kAppend,
                               Query::kMultiSet, Query::kQueuePush,  Query::kWait, Query::kBarrier};
  return std::ranges::count(kAdding, QueryReader(query).query()) > 0;
}

}  // namespace

int StoreServer::Connection::first_byte() const {
  if (greeted || !channel.input().empty()) return static_cast<int>(Query::kValidate);
  char first = static_cast<char>(Query::kValidate);
  return ::recv(channel.fd(), &first, 1, MSG_PEEK | MSG_DONTWAIT) < 0 ? kSilent : first & 0xff;
}

StoreServer::StoreServer(base::UniqueFd listener, size_t max_bytes, Hooks hooks)
    : listener_(std::move(listener)),
      hooks_(std::move(hooks)),
      spare_(open_spare()),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      max_newcomers_(max_newcomers()),
      max_bytes_(max_bytes),
      answers_([this](uint64_t client) { wake(static_cast<int>(client)); }, max_bytes) {
  // accept() must not block if the client disconnects before it.
  set_nonblocking(listener_);
  if (!timer_) base::throw_errno("cannot serve the store");
  for (const int fd : {listener_.get(), timer_.get()}) watched_.add(fd);
}

void StoreServer::handle() {
  for (const int fd : watched_.ready(kMaxEvents)) {
    if (fd == listener_.get()) {
      accept_connections();
    } else if (fd == timer_.get()) {
      drop_late_newcomers();
    } else {
      handle_connection(fd);
    }
  }
}

// Returns whether more connections may wait.
bool StoreServer::accept_connections() {
  for (size_t i = 0; i < kMaxEvents; ++i) {
    base::UniqueFd accepted(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!accepted) {
      // Clients retry.
      if (errno == EMFILE || errno == ENFILE) drop_connection(listener_.get(), spare_);
      return false;
    }
    make_room();
    // Clients connect again. The launcher needs the other descriptors.
    if (connections_.size() >= 2 * max_newcomers_) continue;
    const int fd = accepted.get();
    if (!watched_.try_add(fd)) continue;
    base::detect_lost_host(fd);
    Connection& connection = connections_[fd];
    connection.channel =
        base::Channel(std::move(accepted), SIZE_MAX);  // answer_queries() limits it
    connection.deadline = Clock::now() + kGreetingTimeout;
    newcomers_.push_back(fd);
    if (newcomers_.size() == 1) set_timer();
  }
  return true;
}

// Connections that never send anything must not keep others out: closes the oldest of them. Without
// one, if there is no place left, closes the oldest that has not greeted.
void StoreServer::make_room() {
  const bool is_full = connections_.size() >= 2 * max_newcomers_;
  if (newcomers_.size() < max_newcomers_ && !is_full) return;
  for (const int fd : newcomers_) {
    Connection& connection = connections_.at(fd);
    if (connection.first_byte() != Connection::kSilent) continue;
    remove(connection);
    return;
  }
  if (is_full && !newcomers_.empty()) remove(connections_.at(newcomers_.front()));
}

void StoreServer::drop_late_newcomers() {
  while (!newcomers_.empty()) {
    Connection& oldest = connections_.at(newcomers_.front());
    if (oldest.deadline > Clock::now()) break;
    remove(oldest);
  }
  set_timer();
}

void StoreServer::set_timer() {
  using std::chrono::milliseconds;
  if (newcomers_.empty()) return launch::set_timer(timer_, milliseconds(0));
  const auto left = connections_.at(newcomers_.front()).deadline - Clock::now();
  launch::set_timer(timer_, std::max(milliseconds(1), std::chrono::ceil<milliseconds>(left)));
}

void StoreServer::handle_connection(int fd) {
  // An earlier event of this batch may have closed it.
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  Connection& connection = found->second;
  base::Channel& channel = connection.channel;
  const size_t max = connection.greeted ? base::Channel::kMaxAtOnce : kMaxGreeting;
  if ((connection.events & EPOLLIN) != 0) channel.receive(max);
  const std::string_view input = channel.input();
  const bool begins_as_client =
      input.empty() || input.front() == static_cast<char>(Query::kValidate);
  if (!connection.greeted && !begins_as_client) {
    base::Channel stranger = remove(connection);
    if (hooks_.foreign) hooks_.foreign(std::move(stranger));
    return;
  }
  count_buffers(connection);
  const bool is_too_large = connection.buffered > kFreeBuffer && !has_room(connection);
  if (is_too_large || !answer_queries(connection) || channel.has_ended()) {
    remove(connection);
  } else {
    flush(connection);
  }
}

/// Answers the complete queries until kMaxUnsent bytes of answers are unsent.
/// @return false if the connection is to be closed.
bool StoreServer::answer_queries(Connection& connection) {
  base::Channel& channel = connection.channel;
  while (channel.error() == 0) {
    if (channel.unsent() >= kMaxUnsent) channel.flush();
    if (channel.unsent() >= kMaxUnsent) return true;
    const auto result = connection.scanner.scan(channel.input());
    if (result != QueryScanner::Result::kComplete)
      return result != QueryScanner::Result::kMalformed;
    const size_t size = std::exchange(connection.scanner, {}).size();
    if (!answer(connection, channel.input().substr(0, size))) return false;
    channel.consume(size);
  }
  return false;
}

/// @return false if the connection is to be closed.
bool StoreServer::answer(Connection& connection, std::string_view query) {
  QueryReader in(query);
  // The greeting is the first query, and only that.
  const bool greets = in.query() == Query::kValidate;
  if (greets == connection.greeted) return false;
  connection.greeted = true;
  if (greets) {
    const int client = connection.channel.fd();
    std::erase(newcomers_, client);
    // The last places are for launchers, which connect to the same port.
    const size_t clients = connections_.size() - newcomers_.size();
    if (clients > 2 * max_newcomers_ - max_newcomers_ / 4) {
      if (!std::exchange(said_crowded_, true)) {
        notices_.push_back(
            fmt::format("the workers' store has {} clients, and accepts no more: "
                        "`ulimit -n` leaves no room for them",
                        clients - 1));
      }
      return false;
    }
    if (hooks_.admits && !hooks_.admits(client)) {
      refusals_.push_back(
          fmt::format("refused a client of the workers' store at {}: no launcher with the job's "
                      "token has joined from there",
                      base::peer_address(client)));
      return false;
    }
    return in.integer<uint32_t>() == store::kMagic;
  }
  if (adds_to_store(query) && !has_room(connection)) return false;
  std::string answer;
  if (!answers_.answer(static_cast<uint64_t>(connection.channel.fd()), query, answer)) return false;
  connection.channel.queue(answer);
  if (connection.channel.unsent() > kFreeBuffer) connection.channel.flush();
  count_buffers(connection);
  // Otherwise many clients that request large values and do not read them would use up all memory.
  return connection.buffered <= kFreeBuffer || buffered_ <= max_bytes_ || has_room(connection);
}

void StoreServer::flush(Connection& connection) {
  connection.channel.flush();
  count_buffers(connection);
  uint32_t events = 0;
  if (connection.channel.unsent() < kMaxUnsent) events |= EPOLLIN;
  if (connection.channel.unsent() > 0) events |= EPOLLOUT;
  if (events != std::exchange(connection.events, events)) {
    watched_.change(connection.channel.fd(), events);
  }
}

void StoreServer::count_buffers(Connection& connection) {
  const size_t now = connection.channel.input().size() + connection.channel.unsent();
  buffered_ += now - std::exchange(connection.buffered, now);
}

bool StoreServer::has_room(const Connection& connection) {
  if (answers_.bytes() + buffered_ <= max_bytes_) return true;
  if (!std::exchange(said_full_, true)) {
    notices_.push_back(fmt::format(
        "the workers' store is full: {} of at most {} are in use, and a client at {} "
        "needs more, which closes its connection (--rdzv_conf=store_mib=N raises the limit)",
        base::format_bytes(answers_.bytes() + buffered_), base::format_bytes(max_bytes_),
        base::peer_address(connection.channel.fd())));
  }
  return false;
}

/// Removes the connection from the server and returns its channel.
base::Channel StoreServer::remove(Connection& connection) {
  const int fd = connection.channel.fd();
  buffered_ -= connection.buffered;
  std::erase(newcomers_, fd);
  answers_.remove(static_cast<uint64_t>(fd));
  base::Channel channel = std::move(connection.channel);
  // Closing is not enough: a forked process may have the socket as well.
  watched_.remove(fd);
  connections_.erase(fd);
  return channel;
}

void StoreServer::set(std::string_view key, std::string value) {
  answers_.set(wire_key(key), std::move(value));
}

std::optional<std::string> StoreServer::get(std::string_view key) const {
  const std::string* const value = answers_.find(wire_key(key));
  return value == nullptr ? std::nullopt : std::optional(*value);
}

int64_t StoreServer::add(std::string_view key, int64_t amount) {
  const auto result = answers_.add(wire_key(key), amount);
  if (!result) {
    throw base::UnavailableError(
        fmt::format("cannot add {} to the store's key '{}': its value '{}' is not an integer, or "
                    "the sum is too large",
                    amount, key, get(key).value_or("")));
  }
  return *result;
}

size_t StoreServer::clients() const {
  return static_cast<size_t>(
      std::ranges::count_if(connections_, [](const auto& one) { return one.second.greeted; }));
}

void StoreServer::clear() {
  // Includes clients of the ended attempt that are still in the listener's queue.
  while (accept_connections()) {
  }
  std::vector<Connection*> clients;
  for (auto& [fd, connection] : connections_) {
    if (connection.first_byte() == static_cast<int>(Query::kValidate)) {
      clients.push_back(&connection);
    }
  }
  for (Connection* client : clients) remove(*client);
  answers_.clear();
  said_full_ = said_crowded_ = false;
}

void StoreServer::wake(int fd) {
  Connection& connection = connections_.at(fd);
  connection.channel.queue({reinterpret_cast<const char*>(&store::kStopWaiting), 1});
  flush(connection);
}

}  // namespace syncbn::launch
