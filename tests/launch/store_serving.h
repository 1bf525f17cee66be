#pragma once

#include <poll.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/unique_fd.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <future>
#include <mutex>
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

  ~ServingStore() {
    run([this](StoreServer&) { stopped_ = true; });
    thread_.join();
  }
  ServingStore(const ServingStore&) = delete;
  ServingStore& operator=(const ServingStore&) = delete;

  int port() const { return port_; }
  StoreClient client() const { return StoreClient::connect("127.0.0.1", port_, soon()); }

  /// Runs `task` in the server's thread, and waits until it has run.
  void run(const std::function<void(StoreServer&)>& task) {
    std::packaged_task<void()> packaged([&] { task(server_); });
    std::future<void> done = packaged.get_future();
    {
      const std::scoped_lock lock(mutex_);
      tasks_.push_back(std::move(packaged));
    }
    ::eventfd_write(wake_.get(), 1);
    done.get();
  }

 private:
  ServingStore(Listener listener, std::function<void(base::Channel)> foreign, size_t max_bytes)
      : port_(listener.port),
        server_(std::move(listener.fd), max_bytes, {.foreign = std::move(foreign)}),
        wake_(::eventfd(0, EFD_CLOEXEC)),
        thread_([this] { serve(); }) {}

  void serve() {
    while (!stopped_) {
      std::vector<pollfd> polls{{server_.fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
      ::poll(polls.data(), polls.size(), -1);
      if (polls[0].revents != 0) server_.handle();
      if (polls[1].revents != 0) run_tasks();
    }
  }

  void run_tasks() {
    eventfd_t count = 0;
    ::eventfd_read(wake_.get(), &count);
    std::vector<std::packaged_task<void()>> tasks;
    {
      const std::scoped_lock lock(mutex_);
      tasks.swap(tasks_);
    }
    for (auto& task : tasks) task();
  }

  int port_;
  StoreServer server_;
  base::UniqueFd wake_;
  bool stopped_ = false;
  std::mutex mutex_;
  std::vector<std::packaged_task<void()>> tasks_;
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

/// A client for queries that StoreClient does not send. Each call waits for the answer without a
/// limit.
class RawClient {
 public:
  explicit RawClient(int port) : connection_(port) {
    send(store::Query::kValidate, [](std::string& out) { store::put_integer(out, store::kMagic); });
  }

  void set(const std::string& key, const std::string& value) const {
    send_strings(store::Query::kSet, {store::wire_key(key), value});
  }
  std::string get(const std::string& key) const {
    send_strings(store::Query::kGet, {store::wire_key(key)});
    return receive_string();
  }
  int64_t add(const std::string& key, int64_t amount) const {
    send(store::Query::kAdd, [&](std::string& out) {
      store::put_string(out, store::wire_key(key));
      store::put_integer(out, amount);
    });
    return receive<int64_t>();
  }
  bool check(const std::vector<std::string>& keys) const {
    send_keys(store::Query::kCheck, keys);
    return answer_is(store::kReady, store::kNotReady);
  }
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) const {
    send_strings(store::Query::kCompareSet, {store::wire_key(key), expected, desired});
    return receive_string();
  }
  std::vector<std::string> multi_get(const std::vector<std::string>& keys) const {
    send_keys(store::Query::kMultiGet, keys);
    std::vector<std::string> values(keys.size());
    for (std::string& value : values) value = receive_string();
    return values;
  }
  bool delete_key(const std::string& key) const {
    send_strings(store::Query::kDeleteKey, {store::wire_key(key)});
    return receive<int64_t>() == 1;
  }

  void start_wait(const std::vector<std::string>& keys) const {
    send_keys(store::Query::kWait, keys);
  }
  bool has_answer() const { return connection_.has_received(); }
  void finish_wait() const {
    if (receive<uint8_t>() != store::kStopWaiting) throw base::InternalError("not a wait's end");
  }
  /// Whether the keys were set before the store read this query.
  bool cancel_wait() const {
    send(store::Query::kCancelWait, [](std::string&) {});
    if (answer_is(store::kWaitCanceled, store::kStopWaiting)) return false;
    if (!answer_is(store::kWaitCanceled, store::kWaitCanceled)) {
      throw base::InternalError("the store has not answered kCancelWait");
    }
    return true;
  }

 private:
  template <typename Fields>
  void send(store::Query query, Fields&& put_fields) const {
    std::string bytes = store::begin_query(query);
    put_fields(bytes);
    connection_.send(bytes);
  }
  void send_strings(store::Query query, const std::vector<std::string>& strings) const {
    send(query, [&](std::string& out) {
      for (const std::string& one : strings) store::put_string(out, one);
    });
  }
  void send_keys(store::Query query, const std::vector<std::string>& keys) const {
    send(query, [&](std::string& out) {
      store::put_integer<uint64_t>(out, keys.size());
      for (const std::string& key : keys) store::put_string(out, store::wire_key(key));
    });
  }

  template <typename Integer>
  Integer receive() const {
    const std::string bytes = connection_.receive(sizeof(Integer));
    if (bytes.size() != sizeof(Integer)) throw base::UnavailableError("the store has disconnected");
    return store::integer_at<Integer>(bytes);
  }
  std::string receive_string() const { return connection_.receive(receive<uint64_t>()); }
  bool answer_is(uint8_t yes, uint8_t no) const {
    const auto answer = receive<uint8_t>();
    if (answer != yes && answer != no) throw base::InternalError("no answer of a store");
    return answer == yes;
  }

  RawConnection connection_;
};

}  // namespace syncbn::launch::test
