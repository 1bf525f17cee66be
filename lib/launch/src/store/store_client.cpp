#include "store/store_client.h"

#include <fmt/format.h>
#include <poll.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/store_greeting.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "store/store_protocol.h"

namespace syncbn::launch {
namespace {

using store::begin_query;
using store::put_integer;
using store::put_string;
using store::Query;
using store::wire_key;
using Clock = std::chrono::steady_clock;
using TimePoint = StoreClient::TimePoint;

constexpr std::chrono::milliseconds kRetryPause{100};
// Time limit for the answer to kCancelWait, which a live store sends at once.
constexpr std::chrono::seconds kCancelPatience{10};

constexpr std::string_view kTooLate = "no answer in time";
constexpr std::string_view kClosed = "it closed the connection";
constexpr std::string_view kNoStore = "what listens there does not answer as a store of torch does";

std::string keys_query(Query query, const std::vector<std::string>& keys) {
  std::string bytes = begin_query(query);
  put_integer<uint64_t>(bytes, keys.size());
  for (const std::string& key : keys) put_string(bytes, wire_key(key));
  return bytes;
}

std::string key_query(Query query, std::string_view key) {
  std::string bytes = begin_query(query);
  put_string(bytes, wire_key(key));
  return bytes;
}

std::string quoted(const std::vector<std::string>& keys) {
  constexpr size_t kShown = 3;
  std::vector<std::string> shown;
  for (size_t i = 0; i < std::min(keys.size(), kShown); ++i) {
    shown.push_back(fmt::format("'{}'", keys[i]));
  }
  if (keys.size() > kShown) shown.push_back(fmt::format("{} more", keys.size() - kShown));
  return base::join(shown, ", ");
}

}  // namespace

StoreClient StoreClient::connect(const std::string& host, int port, TimePoint deadline) {
  for (;;) {
    StoreClient client(fmt::format("{}:{}", host, port));
    bool is_store = false;
    try {
      is_store = client.connect_once(host, port, deadline);
    } catch (const base::UnavailableError&) {
      if (Clock::now() + kRetryPause >= deadline) throw;
      ::poll(nullptr, 0, static_cast<int>(kRetryPause.count()));
      continue;
    }
    if (!is_store) client.disconnect(kNoStore);
    return client;
  }
}

// Returns whether the server answers as a TCPStore.
bool StoreClient::connect_once(const std::string& host, int port, TimePoint deadline) {
  what_ = "connect";
  std::string reason;
  const base::AddressList addresses = base::resolve(host, port, reason);
  base::UniqueFd fd = base::connect_to_any(addresses.get(), deadline, reason);
  if (!fd) fail(reason);
  channel_ = base::Channel(std::move(fd), SIZE_MAX);  // ask() waits until each query is sent
  const auto nonce = static_cast<uint32_t>(::getpid());
  ask("connect", base::store_greeting(nonce), deadline);
  return receive_integer<uint32_t>(deadline) == nonce;
}

void StoreClient::set(std::string_view key, std::string_view value, TimePoint deadline) {
  std::string query = key_query(Query::kSet, key);
  put_string(query, value);
  ask(fmt::format("set '{}'", key), query, deadline);
}

std::string StoreClient::get(std::string_view key, TimePoint deadline) {
  const std::string what = fmt::format("get '{}'", key);
  ask_and_wait(what, {std::string(key)}, deadline);
  ask(what, key_query(Query::kGet, key), deadline);
  return receive_string(deadline);
}

std::vector<std::string> StoreClient::multi_get(const std::vector<std::string>& keys,
                                                TimePoint deadline) {
  const std::string what = fmt::format("get {}", quoted(keys));
  ask_and_wait(what, keys, deadline);
  ask(what, keys_query(Query::kMultiGet, keys), deadline);
  std::vector<std::string> values(keys.size());
  for (std::string& value : values) value = receive_string(deadline);
  return values;
}

int64_t StoreClient::add(std::string_view key, int64_t amount, TimePoint deadline) {
  std::string query = key_query(Query::kAdd, key);
  put_integer(query, amount);
  ask(fmt::format("add {} to '{}'", amount, key), query, deadline);
  return receive_integer<int64_t>(deadline);
}

void StoreClient::register_client(TimePoint deadline) {
  std::string query = store::begin_query(Query::kAdd);
  put_string(query, "init/");  // no wire_key()
  put_integer<int64_t>(query, 1);
  ask("register this client", query, deadline);
  receive_integer<int64_t>(deadline);
}

bool StoreClient::check(const std::vector<std::string>& keys, TimePoint deadline) {
  ask(fmt::format("check {}", quoted(keys)), keys_query(Query::kCheck, keys), deadline);
  const auto answer = receive_integer<uint8_t>(deadline);
  if (answer != store::kReady && answer != store::kNotReady) disconnect(kNoStore);
  return answer == store::kReady;
}

void StoreClient::wait(const std::vector<std::string>& keys, TimePoint deadline) {
  ask_and_wait(fmt::format("wait for {}", quoted(keys)), keys, deadline);
}

std::string StoreClient::compare_set(std::string_view key, std::string_view expected,
                                     std::string_view desired, TimePoint deadline) {
  std::string query = key_query(Query::kCompareSet, key);
  put_string(query, expected);
  put_string(query, desired);
  ask(fmt::format("compare and set '{}'", key), query, deadline);
  return receive_string(deadline);
}

bool StoreClient::delete_key(std::string_view key, TimePoint deadline) {
  ask(fmt::format("delete '{}'", key), key_query(Query::kDeleteKey, key), deadline);
  return receive_integer<int64_t>(deadline) == 1;
}

void StoreClient::start_wait(const std::vector<std::string>& keys, TimePoint deadline) {
  ask(fmt::format("wait for {}", quoted(keys)), keys_query(Query::kWait, keys), deadline);
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

bool StoreClient::cancel_wait(TimePoint deadline) {
  if (!waiting_) throw base::InternalError("cancel_wait() without start_wait()");
  waiting_ = false;
  ask(what_, begin_query(Query::kCancelWait), deadline);
  const auto first = receive_integer<uint8_t>(deadline);
  if (first == store::kWaitCanceled) return false;
  // The keys were set before the store read our query; it answers both.
  if (first != store::kStopWaiting || receive_integer<uint8_t>(deadline) != store::kWaitCanceled) {
    disconnect(kNoStore);
  }
  return true;
}

void StoreClient::check_connection() {
  what_ = "stay connected";
  if (has_received(1)) disconnect(kNoStore);
}

void StoreClient::ask_and_wait(const std::string& what, const std::vector<std::string>& keys,
                               TimePoint deadline) {
  ask(what, keys_query(Query::kWait, keys), deadline);
  waiting_ = true;
  while (!wait_done()) {
    if (base::poll_until(fd(), POLLIN, deadline)) continue;
    if (!cancel_wait(Clock::now() + kCancelPatience)) fail("not there in time");
    return;
  }
}

void StoreClient::ask(const std::string& what, std::string_view query, TimePoint deadline) {
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

std::string StoreClient::receive(size_t size, TimePoint deadline) {
  while (!has_received(size)) {
    if (!base::poll_until(fd(), POLLIN, deadline)) disconnect(kTooLate);
  }
  std::string bytes(channel_.input().substr(0, size));
  channel_.consume(size);
  return bytes;
}

std::string StoreClient::receive_string(TimePoint deadline) {
  const auto size = receive_integer<uint64_t>(deadline);
  if (size > store::kMaxMessageSize) disconnect(kNoStore);
  return receive(size, deadline);
}

template <typename Integer>
Integer StoreClient::receive_integer(TimePoint deadline) {
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
