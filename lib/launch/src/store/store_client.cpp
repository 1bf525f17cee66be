#include "store/store_client.h"

#include <fmt/format.h>
#include <poll.h>
#include <syncbn/base/error.h>
#include <syncbn/base/store_greeting.h>
#include <unistd.h>

#include <cstring>

#include "common/clock.h"
#include "store/store_protocol.h"

namespace syncbn::launch {
namespace {

using store::make_query;
using store::Query;
using store::wire_key;

constexpr std::chrono::milliseconds kRetryPause{100};

constexpr std::string_view kTooLate = "no answer in time";
constexpr std::string_view kClosed = "it closed the connection";
constexpr std::string_view kNoStore = "what listens there does not answer as a store of torch does";

}  // namespace

StoreClient StoreClient::connect(const std::string& host, int port, base::Deadline deadline,
                                 Retry retry) {
  for (;;) {
    StoreClient client(fmt::format("{}:{}", host, port));
    bool is_store = false;
    try {
      is_store = client.connect_once(host, port, deadline);
    } catch (const base::UnavailableError&) {
      if (retry == Retry::kNever || Clock::now() + kRetryPause >= deadline) throw;
      ::poll(nullptr, 0, static_cast<int>(kRetryPause.count()));
      continue;
    }
    if (!is_store) client.disconnect(kNoStore);
    return client;
  }
}

// Returns whether the server answers as a TCPStore.
bool StoreClient::connect_once(const std::string& host, int port, base::Deadline deadline) {
  what_ = "connect";
  std::string reason;
  const base::AddressList addresses = base::resolve(host, port, reason);
  base::UniqueFd fd = base::connect_to_any(addresses.get(), deadline, reason);
  if (!fd) fail(reason);
  base::detect_lost_host(fd.get());
  channel_ = base::Channel(std::move(fd), SIZE_MAX);  // ask() waits until each query is sent
  const auto nonce = static_cast<uint32_t>(::getpid());
  ask("connect", base::store_greeting(nonce), deadline);
  return receive_integer<uint32_t>(deadline) == nonce;
}

void StoreClient::set(std::string_view key, std::string_view value, base::Deadline deadline) {
  ask(fmt::format("set '{}'", key), make_query(Query::kSet, wire_key(key), value), deadline);
}

std::string StoreClient::get(std::string_view key, base::Deadline deadline) {
  ask(fmt::format("get '{}'", key), make_query(Query::kGet, wire_key(key)), deadline);
  const auto size = receive_integer<uint64_t>(deadline);
  if (size > store::kMaxMessageSize) disconnect(kNoStore);
  return receive(size, deadline);
}

int64_t StoreClient::add(std::string_view key, int64_t amount, base::Deadline deadline) {
  ask(fmt::format("add {} to '{}'", amount, key), make_query(Query::kAdd, wire_key(key), amount),
      deadline);
  return receive_integer<int64_t>(deadline);
}

void StoreClient::register_client(base::Deadline deadline) {
  // Not a wire_key().
  ask("register this client", make_query(Query::kAdd, "init/", int64_t{1}), deadline);
  receive_integer<int64_t>(deadline);
}

void StoreClient::start_wait(std::string_view key, base::Deadline deadline) {
  ask(fmt::format("wait for '{}'", key),
      make_query(Query::kWait, std::vector<std::string>{wire_key(key)}), deadline);
  waiting_ = true;
}

bool StoreClient::wait_done() {
  if (!waiting_) throw base::InternalError("wait_done() without start_wait()");
  if (!has_received(1)) return false;
  const auto answer = receive_integer<uint8_t>({});
  if (answer != store::kStopWaiting) disconnect(kNoStore);
  waiting_ = false;
  return true;
}

void StoreClient::check_connection() {
  what_ = "stay connected";
  if (has_received(1)) disconnect(kNoStore);
}

void StoreClient::ask(const std::string& what, std::string_view query, base::Deadline deadline) {
  if (waiting_) throw base::InternalError(fmt::format("a store was asked to {} in a wait", what));
  what_ = what;
  if (!channel_.is_open()) fail("the connection was closed after an earlier failure");
  channel_.send(query);
  while (channel_.unsent() > 0) {
    if (!base::poll_until(fd(), POLLOUT, deadline)) disconnect(kTooLate);
    channel_.flush();
  }
  if (channel_.error() != 0) disconnect(std::strerror(channel_.error()));
}

bool StoreClient::has_received(size_t size) {
  if (channel_.input().size() < size) channel_.receive();
  if (channel_.input().size() >= size) return true;
  if (!channel_.has_ended()) return false;
  disconnect(channel_.error() == 0 ? kClosed : std::strerror(channel_.error()));
}

std::string StoreClient::receive(size_t size, base::Deadline deadline) {
  while (!has_received(size)) {
    if (!base::poll_until(fd(), POLLIN, deadline)) disconnect(kTooLate);
  }
  std::string bytes(channel_.input().substr(0, size));
  channel_.consume(size);
  return bytes;
}

template <typename Integer>
Integer StoreClient::receive_integer(base::Deadline deadline) {
  return store::integer_at<Integer>(receive(sizeof(Integer), deadline));
}

void StoreClient::fail(std::string_view why) const {
  throw base::UnavailableError(fmt::format("store at {}: cannot {}: {}", name_, what_, why));
}

void StoreClient::disconnect(std::string_view why) {
  channel_.close();
  waiting_ = false;
  fail(why);
}

}  // namespace syncbn::launch
