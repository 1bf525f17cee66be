#include "store/store_server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace syncbn::launch {
namespace {

using store::put_integer;
using store::Query;
using store::QueryReader;
using store::QueryScanner;
using store::wire_key;

constexpr uint64_t kListenerId = 0;
// Upper bound on the events that one call of handle() processes.
constexpr size_t kMaxEvents = 64;
// The server reads no further queries of a client that leaves this many bytes of answers unread.
constexpr size_t kMaxUnsent = size_t{1} << 20;

base::UniqueFd open_spare() {
  return base::UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

// A quarter of the descriptors: the launcher needs the rest.
size_t max_silent_connections() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 256;
  return std::max<size_t>(1, limit.rlim_cur / 4);
}

}  // namespace

struct StoreServer::Connection {
  uint64_t id = 0;
  base::Channel channel;
  uint32_t watched = 0;
  bool greeted = false;
  QueryScanner scanner;  ///< of the first query in the input

  /// What recv() returns for its first byte; 0 if the server has read from it.
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

StoreServer::StoreServer(base::UniqueFd listener, ForeignSink foreign)
    : listener_(std::move(listener)),
      foreign_(std::move(foreign)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      spare_(open_spare()),
      max_silent_(max_silent_connections()),
      answers_([this](uint64_t id) { wake(id); }) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kListenerId}};
  // accept() must not block if the client disconnects before it.
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0) {
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
      if (errno == EMFILE || errno == ENFILE) drop_newcomer();
      return false;
    }
    make_room();
    base::detect_lost_host(fd.get());
    auto connection = std::make_unique<Connection>();
    connection->id = ++last_id_;
    connection->channel = base::Channel(std::move(fd), SIZE_MAX);  // answer_queries() limits it
    epoll_event event{.events = EPOLLIN, .data = {.u64 = connection->id}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->channel.fd(), &event) != 0) continue;
    connection->watched = event.events;
    connections_.emplace(connection->id, std::move(connection));
  }
  return true;
}

// Connections that never send anything must not keep others out: closes the oldest of them.
void StoreServer::make_room() {
  size_t silent = 0;
  Connection* first = nullptr;
  for (const auto& [id, connection] : connections_) {
    if (!connection->is_silent()) continue;
    ++silent;
    if (first == nullptr || id < first->id) first = connection.get();
  }
  if (silent >= max_silent_) remove(*first);
}

// Without a free descriptor, poll() would report this connection again and again. Clients retry.
void StoreServer::drop_newcomer() {
  if (!spare_) spare_ = open_spare();
  spare_.reset();
  base::UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
  spare_ = open_spare();
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
  if (readable) channel.receive();
  if (!readable && lost) {
    remove(connection);
    return;
  }
  const std::string_view input = channel.input();
  const bool begins_as_client =
      input.empty() || input.front() == static_cast<char>(Query::kValidate);
  if (!connection.greeted && !begins_as_client) {
    base::Channel stranger = remove(connection);
    if (foreign_) foreign_(std::move(stranger));
    return;
  }
  if (!answer_queries(connection) || channel.has_ended()) {
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
  if (greets) return in.integer<uint32_t>() == store::kMagic;
  std::string answer;
  const bool is_allowed = answers_.answer(connection.id, query, answer);
  connection.channel.queue(answer);
  return is_allowed;
}

void StoreServer::flush(Connection& connection) {
  connection.channel.flush();
  uint32_t events = 0;
  if (connection.channel.unsent() < kMaxUnsent) events |= EPOLLIN;
  if (connection.channel.unsent() > 0) events |= EPOLLOUT;
  if (events == connection.watched) return;
  connection.watched = events;
  epoll_event event{.events = events, .data = {.u64 = connection.id}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.channel.fd(), &event);
}

/// Removes the connection from the server and returns its channel.
base::Channel StoreServer::remove(Connection& connection) {
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
}

void StoreServer::wake(uint64_t id) {
  Connection& connection = *connections_.at(id);
  std::string answer;
  put_integer(answer, store::kStopWaiting);
  connection.channel.queue(answer);
  flush(connection);
}

}  // namespace syncbn::launch
