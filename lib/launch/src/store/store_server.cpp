#include "store/store_server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/descriptors.h"

namespace syncbn::launch {
namespace {

using store::put_integer;
using store::Query;
using store::QueryReader;
using store::QueryScanner;
using store::wire_key;

constexpr uint64_t kListenerId = 0;
constexpr uint64_t kTimerId = UINT64_MAX;
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

struct StoreServer::Connection {
  uint64_t id = 0;
  base::Channel channel;
  uint32_t watched = 0;
  bool greeted = false;
  size_t buffered = 0;   ///< its part of StoreServer::buffered_
  QueryScanner scanner;  ///< of the first query in the input

  /// Peeks at its first byte. Returns what recv() does; 0 if the server has read from the
  /// connection.
  ssize_t peek(char& first) const {
    const bool is_new = !greeted && channel.input().empty();
    return is_new ? ::recv(channel.fd(), &first, 1, MSG_PEEK | MSG_DONTWAIT) : 0;
  }
  bool is_silent() const {
    char first = 0;
    return peek(first) < 0;
  }
  bool may_be_foreign() const {
    char first = 0;
    const ssize_t got = peek(first);
    return got < 0 || (got == 1 && first != static_cast<char>(Query::kValidate));
  }
};

StoreServer::StoreServer(base::UniqueFd listener, size_t max_bytes, Hooks hooks)
    : listener_(std::move(listener)),
      hooks_(std::move(hooks)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      spare_(open_spare()),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      max_newcomers_(max_newcomers()),
      max_bytes_(max_bytes),
      answers_([this](uint64_t id) { wake(id); }, max_bytes) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kListenerId}};
  epoll_event late{.events = EPOLLIN, .data = {.u64 = kTimerId}};
  // accept() must not block if the client disconnects before it.
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  if (!epoll_ || !timer_ ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0 ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, timer_.get(), &late) != 0) {
    base::throw_errno("cannot serve the store");
  }
}

StoreServer::~StoreServer() = default;

void StoreServer::handle() {
  std::array<epoll_event, kMaxEvents> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.u64 == kListenerId) {
      accept_connections();
    } else if (event.data.u64 == kTimerId) {
      drop_late_newcomers();
    } else {
      handle_connection(event.data.u64, event.events);
    }
  }
}

// Returns whether more connections may wait.
bool StoreServer::accept_connections() {
  for (size_t i = 0; i < kMaxEvents; ++i) {
    base::UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) {
      // Clients retry.
      if (errno == EMFILE || errno == ENFILE) drop_connection(listener_.get(), spare_);
      return false;
    }
    make_room();
    // Clients connect again. The launcher needs the other descriptors.
    if (connections_.size() >= 2 * max_newcomers_) continue;
    base::detect_lost_host(fd.get());
    auto connection = std::make_unique<Connection>();
    connection->id = ++last_id_;
    connection->channel = base::Channel(std::move(fd), SIZE_MAX);  // answer_queries() limits it
    epoll_event event{.events = EPOLLIN, .data = {.u64 = connection->id}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->channel.fd(), &event) != 0) continue;
    connection->watched = event.events;
    newcomers_.emplace(connection->id, Clock::now() + kGreetingTimeout);
    if (newcomers_.size() == 1) set_timer();
    connections_.emplace(connection->id, std::move(connection));
  }
  return true;
}

// Connections that never send anything must not keep others out: closes the oldest of them. Without
// one, if there is no place left, closes the oldest that has not greeted.
void StoreServer::make_room() {
  const bool is_full = connections_.size() >= 2 * max_newcomers_;
  if (newcomers_.size() < max_newcomers_ && !is_full) return;
  for (const auto& [id, deadline] : newcomers_) {
    Connection& connection = *connections_.at(id);
    if (!connection.is_silent()) continue;
    remove(connection);
    return;
  }
  if (is_full && !newcomers_.empty()) remove(*connections_.at(newcomers_.begin()->first));
}

void StoreServer::drop_late_newcomers() {
  while (!newcomers_.empty() && newcomers_.begin()->second <= Clock::now()) {
    remove(*connections_.at(newcomers_.begin()->first));
  }
  set_timer();
}

void StoreServer::set_timer() {
  using std::chrono::milliseconds;
  if (newcomers_.empty()) return launch::set_timer(timer_, milliseconds(0));
  const auto left = std::chrono::ceil<milliseconds>(newcomers_.begin()->second - Clock::now());
  launch::set_timer(timer_, std::max(milliseconds(1), left));
}

void StoreServer::handle_connection(uint64_t id, uint32_t events) {
  // An earlier event of this batch may have closed it.
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  const bool lost = (events & (EPOLLERR | EPOLLHUP)) != 0;
  // Bytes that arrived before the connection was lost are still processed.
  const bool readable = (events & connection.watched & EPOLLIN) != 0;
  base::Channel& channel = connection.channel;
  if (readable) channel.receive(connection.greeted ? base::Channel::kMaxAtOnce : kMaxGreeting);
  if (!readable && lost) {
    remove(connection);
    return;
  }
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
    newcomers_.erase(connection.id);
    const int client = connection.channel.fd();
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
  if (!answers_.answer(connection.id, query, answer)) return false;
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
  if (events == connection.watched) return;
  connection.watched = events;
  epoll_event event{.events = events, .data = {.u64 = connection.id}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.channel.fd(), &event);
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
  buffered_ -= connection.buffered;
  newcomers_.erase(connection.id);
  answers_.remove(connection.id);
  base::Channel channel = std::move(connection.channel);
  // Closing is not enough: a forked process may have the socket as well.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, channel.fd(), nullptr);
  connections_.erase(connection.id);
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
      std::ranges::count_if(connections_, [](const auto& one) { return one.second->greeted; }));
}

void StoreServer::clear() {
  // Includes clients of the ended attempt that are still in the listener's queue.
  while (accept_connections()) {
  }
  std::vector<Connection*> clients;
  for (const auto& [id, connection] : connections_) {
    if (!connection->may_be_foreign()) clients.push_back(connection.get());
  }
  for (Connection* client : clients) remove(*client);
  answers_.clear();
  said_full_ = said_crowded_ = false;
}

void StoreServer::wake(uint64_t id) {
  Connection& connection = *connections_.at(id);
  std::string answer;
  put_integer(answer, store::kStopWaiting);
  connection.channel.queue(answer);
  flush(connection);
}

}  // namespace syncbn::launch
