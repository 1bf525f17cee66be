#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/unique_fd.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "store/store_client.h"
#include "store/store_protocol.h"
#include "store/store_server.h"
#include "support/connection.h"
#include "support/listener.h"

namespace syncbn::launch::test {

using ::syncbn::test::BoundPort;
using ::syncbn::test::Listener;

/// A deadline that only a hanging test reaches.
inline base::Deadline soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(150);
}

/// A deadline for answers that cannot arrive.
inline base::Deadline now() {
  return std::chrono::steady_clock::now();
}

/// A StoreServer and the thread that runs its poll loop.
class ServingStore {
 public:
  explicit ServingStore(std::function<void(base::Channel)> foreign = {},
                        size_t max_bytes = size_t{64} << 20)
      : ServingStore(Listener(), std::move(foreign), max_bytes) {}

  ~ServingStore() { stop(); }
  ServingStore(const ServingStore&) = delete;
  ServingStore& operator=(const ServingStore&) = delete;

  int port() const { return port_; }
  StoreClient client() const { return StoreClient::connect("127.0.0.1", port_, soon()); }

  /// Runs `task` while the thread does not run.
  void run(const std::function<void(StoreServer&)>& task) {
    stop();
    task(server_);
    start();
  }

 private:
  ServingStore(Listener listener, std::function<void(base::Channel)> foreign, size_t max_bytes)
      : port_(listener.port),
        server_(std::move(listener.fd), max_bytes, {.foreign = std::move(foreign)}),
        stop_(::eventfd(0, EFD_CLOEXEC)) {
    start();
  }

  void start() {
    thread_ = std::thread([this] {
      std::array<pollfd, 2> polls{{{server_.fd(), POLLIN, 0}, {stop_.get(), POLLIN, 0}}};
      while (::poll(polls.data(), polls.size(), -1) > 0 && polls[1].revents == 0) server_.handle();
    });
  }
  void stop() {
    ::eventfd_write(stop_.get(), 1);
    thread_.join();
    eventfd_t ignored = 0;
    ::eventfd_read(stop_.get(), &ignored);
  }

  int port_;
  StoreServer server_;
  base::UniqueFd stop_;
  std::thread thread_;
};

/// A connection that can send any bytes.
class RawConnection {
 public:
  explicit RawConnection(int port) : fd_(::syncbn::test::connect_to(port)) {}

  void send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;  // closed; receive() reveals it
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
  }

  /// Sends until nothing has moved for half a second. Returns the bytes that were not accepted.
  std::string_view send_until_stuck(std::string_view bytes) const {
    const timeval patience{.tv_sec = 0, .tv_usec = 500'000};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) break;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return bytes;
  }

  /// Receives `size` bytes, or fewer if the other side closes first.
  std::string receive(size_t size) const {
    std::string bytes(size, '\0');
    size_t got = 0;
    while (got < size) {
      const ssize_t more = ::recv(fd_.get(), &bytes[got], size - got, 0);
      if (more <= 0) break;
      got += static_cast<size_t>(more);
    }
    bytes.resize(got);
    return bytes;
  }

  bool is_closed() const { return receive(1).empty(); }
  bool has_received() const {
    pollfd ready{fd_.get(), POLLIN, 0};
    return ::poll(&ready, 1, 0) > 0;
  }
  void shutdown() const { ::shutdown(fd_.get(), SHUT_RDWR); }

 private:
  base::UniqueFd fd_;
};

/// A connection that has sent the greeting.
inline RawConnection greeted(int port) {
  RawConnection connection(port);
  connection.send(store::make_query(store::Query::kValidate, store::kMagic));
  return connection;
}

using Keys = std::vector<std::string>;

/// Numbers and texts as in queries and answers.
template <class... Fields>
std::string bytes(const Fields&... fields) {
  std::string all;
  (store::put_field(all, fields), ...);
  return all;
}

const std::string kStop = bytes(store::kStopWaiting);
const std::string kCanceled = bytes(store::kWaitCanceled);

/// Queries, and what a server answers to them.
using Exchanges = std::vector<std::pair<std::string, std::string>>;

inline void expect_answers(const RawConnection& connection, const Exchanges& exchanges) {
  for (size_t i = 0; i < exchanges.size(); ++i) {
    connection.send(exchanges[i].first);
    EXPECT_EQ(connection.receive(exchanges[i].second.size()), exchanges[i].second) << i;
  }
}

/// For a store without keys; leaves one, "/n".
inline Exchanges exchanges_of_all_versions() {
  using store::make_query;
  using store::Query;
  const std::string cancel = make_query(Query::kCancelWait);
  return {{make_query(Query::kAdd, "/n", int64_t{3}), bytes(int64_t{3})},
          {make_query(Query::kAdd, "/n", int64_t{-1}), bytes(int64_t{2})},
          {make_query(Query::kCheck, Keys{"/n"}), bytes(store::kReady)},
          {make_query(Query::kCheck, Keys{"/n", "/none"}), bytes(store::kNotReady)},
          {make_query(Query::kCompareSet, "/c", "expected", "new"), bytes("expected")},
          {make_query(Query::kCheck, Keys{"/c"}), bytes(store::kNotReady)},
          {make_query(Query::kCompareSet, "/c", "", "1"), bytes("1")},
          {make_query(Query::kCompareSet, "/c", "wrong", "new"), bytes("1")},
          {make_query(Query::kCompareSet, "/c", "1", "22"), bytes("22")},
          {make_query(Query::kMultiGet, Keys{"/c", "/n", "/c"}), bytes("22", "2", "22")},
          {make_query(Query::kDeleteKey, "/c"), bytes(int64_t{1})},
          {make_query(Query::kDeleteKey, "/c"), bytes(int64_t{0})},
          {make_query(Query::kWait, Keys{"/n"}), kStop},
          {make_query(Query::kWait, Keys{"/none", "/n"}) + cancel, kCanceled},
          {make_query(Query::kWait, Keys{"/none"}) + cancel, kCanceled}};
}

}  // namespace syncbn::launch::test
