#include "store/store_server.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <syncbn/base/error.h>
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
// In one call of handle(), so that whoever calls it gets to its other work.
constexpr size_t kMostEvents = 64;
constexpr size_t kReadSize = size_t{64} << 10;
// A client with so many bytes of answers to read has to read before it may ask again.
constexpr size_t kMostPending = size_t{1} << 20;

base::UniqueFd open_spare() {
  return base::UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

// Of the descriptors that this process may have, whose owner needs some, too.
size_t most_silent_connections() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 256;
  return std::max<size_t>(1, limit.rlim_cur / 4);
}

}  // namespace

struct StoreServer::Connection {
  uint64_t id = 0;
  base::UniqueFd fd;
  uint32_t watched = 0;
  bool greeted = false;
  bool broken = false;  ///< nothing can be written to it any more
  std::string input;
  QueryScanner scanner;  ///< of the first query in input
  SendBuffer output;
};

StoreServer::StoreServer(base::UniqueFd listener, ForeignSink foreign)
    : listener_(std::move(listener)),
      foreign_(std::move(foreign)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      spare_(open_spare()),
      most_silent_(most_silent_connections()),
      answers_([this](uint64_t id) { wake(id); }) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kListenerId}};
  // Whoever was about to be accepted may be gone by then.
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0) {
    base::throw_errno("cannot serve the store");
  }
}

StoreServer::~StoreServer() = default;

void StoreServer::handle() {
  std::array<epoll_event, kMostEvents> events;
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

// Whether there may be more.
bool StoreServer::accept_connections() {
  for (size_t i = 0; i < kMostEvents; ++i) {
    base::UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE) drop_newcomer();
      return false;
    }
    make_room();
    // The answers are small, and their readers wait for them.
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    auto connection = std::make_unique<Connection>();
    connection->id = ++last_id_;
    connection->fd = std::move(fd);
    epoll_event event{.events = EPOLLIN, .data = {.u64 = connection->id}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->fd.get(), &event) != 0) continue;
    connection->watched = event.events;
    connections_.emplace(connection->id, std::move(connection));
  }
  return true;
}

// It has not said a word yet, or not as a client does.
bool StoreServer::may_be_foreign(const Connection& connection) {
  if (connection.greeted || !connection.input.empty()) return false;
  char first = 0;
  const ssize_t got = ::recv(connection.fd.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  return got < 0 || (got == 1 && first != static_cast<char>(Query::kValidate));
}

// It has not said a word, and has not left either.
bool StoreServer::is_silent(const Connection& connection) {
  char first = 0;
  return !connection.greeted && connection.input.empty() &&
         ::recv(connection.fd.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT) < 0;
}

// Those that never speak must not keep out those that do: the one that came first goes.
void StoreServer::make_room() {
  size_t silent = 0;
  Connection* first = nullptr;
  for (const auto& [id, connection] : connections_) {
    if (!is_silent(*connection)) continue;
    ++silent;
    if (first == nullptr || id < first->id) first = connection.get();
  }
  if (silent >= most_silent_) take(*first).reset();
}

// Otherwise it would keep us busy for as long as no descriptor is free. Clients try again.
void StoreServer::drop_newcomer() {
  if (!spare_) spare_ = open_spare();
  spare_.reset();
  base::UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
  spare_ = open_spare();
}

void StoreServer::handle_connection(uint64_t id, uint32_t events) {
  // An event before this one may have closed it.
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  const bool lost = (events & (EPOLLERR | EPOLLHUP)) != 0;
  // What it sent before it was lost still counts.
  const bool readable = (events & connection.watched & EPOLLIN) != 0;
  if (readable ? !read(connection) : lost) return take(connection).reset();
  if (connection.input.empty()) return flush(connection);
  if (!connection.greeted && connection.input.front() != static_cast<char>(Query::kValidate)) {
    std::string first_bytes = std::move(connection.input);
    base::UniqueFd fd = take(connection);
    if (foreign_) foreign_(std::move(fd), std::move(first_bytes));
    return;
  }
  if (!answer_queries(connection)) return take(connection).reset();
  flush(connection);
}

bool StoreServer::read(Connection& connection) {
  std::array<char, kReadSize> buffer;
  const ssize_t got = ::recv(connection.fd.get(), buffer.data(), buffer.size(), 0);
  if (got > 0) connection.input.append(buffer.data(), static_cast<size_t>(got));
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
}

// Answers what has come in, until the answers pile up. False: the connection is to be closed.
bool StoreServer::answer_queries(Connection& connection) {
  size_t done = 0;
  auto result = QueryScanner::Result::kComplete;
  while (!connection.broken && has_room(connection)) {
    const std::string_view rest = std::string_view(connection.input).substr(done);
    result = connection.scanner.scan(rest);
    if (result != QueryScanner::Result::kComplete) break;
    const std::string_view query = rest.substr(0, connection.scanner.size());
    connection.scanner = {};
    if (!answer(connection, query)) return false;
    done += query.size();
  }
  connection.input.erase(0, done);
  if (connection.input.empty()) connection.input.shrink_to_fit();
  return !connection.broken && result != QueryScanner::Result::kMalformed;
}

bool StoreServer::has_room(Connection& connection) {
  if (connection.output.size() >= kMostPending) flush(connection);
  return connection.output.size() < kMostPending;
}

// False: the connection is to be closed.
bool StoreServer::answer(Connection& connection, std::string_view query) {
  QueryReader in(query);
  // The greeting comes first, and once.
  const bool greets = in.query() == Query::kValidate;
  if (greets == connection.greeted) return false;
  if (!greets) return answers_.answer(connection.id, query, connection.output.bytes());
  connection.greeted = true;
  return in.integer<uint32_t>() == store::kMagic;
}

void StoreServer::flush(Connection& connection) {
  SendBuffer& output = connection.output;
  while (!output.empty()) {
    const ssize_t sent =
        ::send(connection.fd.get(), output.view().data(), output.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN) {
      // The connection is closed in its own turn; this makes sure that it gets one.
      connection.broken = true;
      ::shutdown(connection.fd.get(), SHUT_RDWR);
      output.clear();
      break;
    }
    if (sent < 0) break;
    output.take(static_cast<size_t>(sent));
  }
  watch(connection);
}

void StoreServer::watch(Connection& connection) {
  uint32_t events = 0;
  if (connection.output.size() < kMostPending) events |= EPOLLIN;
  if (connection.output.size() > 0) events |= EPOLLOUT;
  if (events == connection.watched) return;
  connection.watched = events;
  epoll_event event{.events = events, .data = {.u64 = connection.id}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd.get(), &event);
}

// Ends the connection as far as this object goes.
base::UniqueFd StoreServer::take(Connection& connection) {
  answers_.forget(connection.id);
  base::UniqueFd fd = std::move(connection.fd);
  // Closing would not be enough: a process that was forked may have the socket, too.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd.get(), nullptr);
  connections_.erase(connection.id);
  return fd;
}

void StoreServer::set(std::string_view key, std::string value) {
  answers_.set(wire_key(key), std::move(value));
}

std::optional<std::string> StoreServer::get(std::string_view key) const {
  const std::string* const value = answers_.values().find(wire_key(key));
  return value == nullptr ? std::nullopt : std::optional(*value);
}

int64_t StoreServer::add(std::string_view key, int64_t amount) {
  const auto result = answers_.add(wire_key(key), amount);
  if (!result) {
    throw base::UnavailableError(fmt::format(
        "cannot add {} to the store's key '{}': its value '{}' is no number, or too large", amount,
        key, get(key).value_or("")));
  }
  return *result;
}

bool StoreServer::check(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(),
                     [&](const std::string& key) { return answers_.values().has(wire_key(key)); });
}

size_t StoreServer::clients() const {
  return static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(),
                                           [](const auto& one) { return one.second->greeted; }));
}

void StoreServer::clear() {
  // Those of the attempt that has ended, which the kernel has accepted for us, among them.
  while (accept_connections()) {
  }
  std::vector<Connection*> clients;
  for (const auto& [id, connection] : connections_) {
    if (!may_be_foreign(*connection)) clients.push_back(connection.get());
  }
  for (Connection* client : clients) take(*client).reset();
  answers_.clear();
}

void StoreServer::wake(uint64_t id) {
  Connection& connection = *connections_.at(id);
  put_integer(connection.output.bytes(), store::kStopWaiting);
  flush(connection);
}

}  // namespace syncbn::launch
