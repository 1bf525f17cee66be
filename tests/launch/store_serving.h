#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <syncbn/base/error.h>
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
#include "store/store_server.h"
#include "support/listener.h"

namespace syncbn::launch::test {

using ::syncbn::test::BoundPort;
using ::syncbn::test::Listener;

/// Far enough away that only a test that hangs gets there.
inline StoreClient::TimePoint soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(50);
}

/// For what cannot come.
inline StoreClient::TimePoint now() {
  return std::chrono::steady_clock::now();
}

/// A StoreServer and the thread that runs its poll loop.
class ServingStore {
 public:
  explicit ServingStore(StoreServer::ForeignSink foreign = {})
      : ServingStore(Listener(), std::move(foreign)) {}

  ~ServingStore() {
    run([this](StoreServer&) { stopped_ = true; });
    thread_.join();
  }
  ServingStore(const ServingStore&) = delete;
  ServingStore& operator=(const ServingStore&) = delete;

  int port() const { return port_; }
  StoreClient client() const { return StoreClient::connect("127.0.0.1", port_, soon()); }

  /// Runs `task` in the server's thread, and waits for its end.
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
  ServingStore(Listener listener, StoreServer::ForeignSink foreign)
      : port_(listener.port),
        server_(std::move(listener.fd), std::move(foreign)),
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

/// A connection that says what it likes.
class RawConnection {
 public:
  explicit RawConnection(int port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    if (::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      base::throw_errno("connect");
    }
  }

  void send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;  // closed, which receive() shows
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
  }

  /// What the other side has not made room for when nothing has moved for half a second.
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

  /// So many bytes, fewer where the other side closes before.
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
  void shutdown() const { ::shutdown(fd_.get(), SHUT_RDWR); }

 private:
  base::UniqueFd fd_;
};

}  // namespace syncbn::launch::test
