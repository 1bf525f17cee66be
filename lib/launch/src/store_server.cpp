#include "store_server.h"

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
#include <charconv>
#include <utility>

namespace syncbn::launch {
namespace {

using store::put_integer;
using store::put_string;
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
  uint64_t ticket = 0;                      ///< its place among those who wait
  std::unordered_set<std::string> awaited;  ///< empty: it does not wait
};

StoreServer::StoreServer(base::UniqueFd listener, ForeignSink foreign)
    : listener_(std::move(listener)),
      foreign_(std::move(foreign)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      spare_(open_spare()),
      most_silent_(most_silent_connections()) {
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
  std::string& out = connection.output.bytes();
  const Query kind = in.query();
  // The greeting comes first, and once.
  if ((kind == Query::kValidate) == connection.greeted) return false;
  switch (kind) {
    case Query::kValidate:
      connection.greeted = true;
      return in.integer<uint32_t>() == store::kMagic;
    case Query::kPing:
      put_integer(out, in.integer<uint32_t>());
      return true;
    case Query::kCheck:
      put_integer(out, has_all(in.strings()) ? store::kReady : store::kNotReady);
      return true;
    case Query::kWait:
      return start_wait(connection, in.strings());
    case Query::kCancelWait:
      cancel_wait(connection);
      put_integer(out, store::kWaitCanceled);
      return true;
    case Query::kMultiGet:
      return put_values(out, in.strings());
    case Query::kMultiSet:
      for (auto pairs = in.integer<uint64_t>(); pairs > 0; --pairs) {
        const std::string key = in.string();
        set_value(key, in.string());
      }
      return true;
    case Query::kGetNumKeys:
      put_integer<uint64_t>(out, values_.size());
      return true;
    case Query::kListKeys:
      put_integer<uint64_t>(out, values_.size());
      for (const auto& [key, value] : values_) put_string(out, key);
      return true;
    default:
      return answer_about(in.string(), kind, in, connection);
  }
}

// The queries whose first field is the one key that they are about.
bool StoreServer::answer_about(const std::string& key, Query kind, QueryReader& in,
                               Connection& connection) {
  std::string& out = connection.output.bytes();
  switch (kind) {
    case Query::kSet:
      set_value(key, in.string());
      return true;
    case Query::kCompareSet: {
      const std::string expected = in.string();
      put_string(out, compare_set(key, expected, in.string()));
      return true;
    }
    case Query::kGet:
      return put_values(out, {key});
    case Query::kAdd: {
      const auto result = add_to(key, in.integer<int64_t>());
      if (result) put_integer(out, *result);
      return result.has_value();
    }
    case Query::kDeleteKey:
      put_integer<uint64_t>(out, values_.erase(key));
      return true;
    case Query::kAppend:
      values_[key].append(in.string());
      wake_all(key);
      return true;
    case Query::kQueuePush:
      queues_[key].push_back(in.string());
      wake_one(key);
      return true;
    case Query::kQueuePop:
      pop(out, key);
      return true;
    case Query::kQueueLen:
      put_integer<uint64_t>(out, queue_length(key));
      return true;
    case Query::kBarrier:
      return enter_barrier(connection, key, in.integer<int64_t>());
    default:
      return false;
  }
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
  cancel_wait(connection);
  base::UniqueFd fd = std::move(connection.fd);
  // Closing would not be enough: a process that was forked may have the socket, too.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd.get(), nullptr);
  connections_.erase(connection.id);
  return fd;
}

void StoreServer::set(std::string_view key, std::string value) {
  set_value(wire_key(key), std::move(value));
}

std::optional<std::string> StoreServer::get(std::string_view key) const {
  const auto found = values_.find(wire_key(key));
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

int64_t StoreServer::add(std::string_view key, int64_t amount) {
  const auto result = add_to(wire_key(key), amount);
  if (!result) {
    throw base::UnavailableError(fmt::format(
        "cannot add {} to the store's key '{}': its value '{}' is no number, or too large", amount,
        key, get(key).value_or("")));
  }
  return *result;
}

bool StoreServer::check(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(),
                     [&](const std::string& key) { return has(wire_key(key)); });
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
  values_.clear();
  queues_.clear();
}

bool StoreServer::has(const std::string& key) const {
  return values_.contains(key) || queue_length(key) > 0;
}

bool StoreServer::has_all(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return has(key); });
}

size_t StoreServer::queue_length(const std::string& key) const {
  const auto found = queues_.find(key);
  return found == queues_.end() ? 0 : found->second.size();
}

void StoreServer::set_value(const std::string& key, std::string value) {
  values_[key] = std::move(value);
  wake_all(key);
}

std::string StoreServer::compare_set(const std::string& key, const std::string& expected,
                                     std::string desired) {
  const auto found = values_.find(key);
  // As torch's server answers, though a client cannot tell it from a value.
  if (found == values_.end() && !expected.empty()) return expected;
  if (found == values_.end() || found->second == expected) set_value(key, std::move(desired));
  return values_[key];
}

// Nothing when the value is not an integer, or the sum is none.
std::optional<int64_t> StoreServer::sum(const std::string& key, int64_t amount) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return amount;
  const std::string& value = found->second;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size()) return std::nullopt;
  if (__builtin_add_overflow(number, amount, &number)) return std::nullopt;
  return number;
}

std::optional<int64_t> StoreServer::add_to(const std::string& key, int64_t amount) {
  const auto result = sum(key, amount);
  if (result) set_value(key, std::to_string(*result));
  return result;
}

// False when that would be too much: a client may name one large value many times.
bool StoreServer::put_values(std::string& out, const std::vector<std::string>& keys) const {
  const size_t before = out.size();
  for (const std::string& key : keys) {
    const auto found = values_.find(key);
    const std::string_view value = found == values_.end() ? "" : std::string_view(found->second);
    if (out.size() - before + value.size() > store::kMaxMessageSize) return false;
    put_string(out, value);
  }
  return true;
}

void StoreServer::pop(std::string& out, const std::string& key) {
  put_integer<uint64_t>(out, queue_length(key));
  const auto found = queues_.find(key);
  if (found == queues_.end()) return;
  put_string(out, found->second.front());
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
}

// Whoever waits for a barrier's key is woken by the last one that comes, not by each.
bool StoreServer::enter_barrier(Connection& connection, const std::string& key,
                                int64_t world_size) {
  const auto count = sum(key, 1);
  if (!count || !connection.awaited.empty()) return false;
  values_[key] = std::to_string(*count);
  if (*count < world_size) {
    connection.ticket = ++last_ticket_;
    add_waiter(connection, key);
    return true;
  }
  wake_all(key);
  put_integer(connection.output.bytes(), store::kStopWaiting);
  return true;
}

bool StoreServer::start_wait(Connection& connection, const std::vector<std::string>& keys) {
  // The answers to two waits could not be told apart.
  if (!connection.awaited.empty()) return false;
  connection.ticket = ++last_ticket_;
  for (const std::string& key : keys) {
    if (!has(key)) add_waiter(connection, key);
  }
  if (connection.awaited.empty()) put_integer(connection.output.bytes(), store::kStopWaiting);
  return true;
}

void StoreServer::add_waiter(Connection& connection, const std::string& key) {
  connection.awaited.insert(key);
  waiters_[key].emplace(connection.ticket, &connection);
}

void StoreServer::cancel_wait(Connection& connection) {
  for (const std::string& key : connection.awaited) {
    const auto found = waiters_.find(key);
    found->second.erase(connection.ticket);
    if (found->second.empty()) waiters_.erase(found);
  }
  connection.awaited.clear();
}

void StoreServer::wake_all(const std::string& key) {
  const auto waiters = waiters_.extract(key);
  if (waiters.empty()) return;
  for (const auto& [ticket, connection] : waiters.mapped()) key_came(*connection, key);
}

// What is in a queue is for one.
void StoreServer::wake_one(const std::string& key) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  Waiters& waiters = found->second;
  for (bool woken = false; !woken && !waiters.empty(); waiters.erase(waiters.begin())) {
    woken = key_came(*waiters.begin()->second, key);
  }
  if (waiters.empty()) waiters_.erase(found);
}

// Whether that was the last key that the connection waited for.
bool StoreServer::key_came(Connection& connection, const std::string& key) {
  connection.awaited.erase(key);
  if (!connection.awaited.empty()) return false;
  put_integer(connection.output.bytes(), store::kStopWaiting);
  flush(connection);
  return true;
}

}  // namespace syncbn::launch
