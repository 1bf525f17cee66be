#pragma once

#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "monitor/watch_link.h"

namespace syncbn::dist::detail {

/// How ranks talk outside of collectives, and learn that one has ended: every rank keeps one
/// connection to rank 0, which passes messages on. It ends with the process. Thread-safe; one
/// thread, which sleeps in poll().
class WatchChannel {
 public:
  /// Called by the thread.
  struct Events {
    std::function<void(const Message&)> message;
    /// The process of a rank has ended, or its host is gone. @param where "host, process 7".
    std::function<void(int rank, const std::string& where)> end;
    /// Some times a second.
    std::function<void()> tick;
  };

  /// Every rank of the world calls it.
  /// @param address under which other hosts reach this one.
  /// @throws base::UnavailableError when rank 0 does not answer within `limit`.
  WatchChannel(c10d::Store& store, int rank, int world_size, const std::string& address,
               std::chrono::milliseconds limit);
  ~WatchChannel();
  WatchChannel(const WatchChannel&) = delete;
  WatchChannel& operator=(const WatchChannel&) = delete;

  /// Called once.
  void start(Events events);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// "host, process 7": of this rank.
  const std::string& where() const { return where_; }

  /// Sends a message to a rank or, but for this one, to all. Does not wait.
  void post(int to, const std::string& type, std::vector<std::string> fields);
  /// Waits until all that was posted, here or to be passed on, is with the kernel; at most `limit`.
  void flush(std::chrono::milliseconds limit);

 private:
  void listen(c10d::Store& store, const std::string& address);
  void connect(c10d::Store& store, std::chrono::milliseconds limit);
  void send(const Message& message);
  void run();
  void wait_for_events();
  void accept_links();
  std::vector<Message> read_links();
  bool greet(WatchLink& link, const std::optional<Message>& hello);
  void drop_strangers();
  void dispatch(const Message& message);
  void follow_forks();
  void close_in_child();

  const int rank_;
  const int world_size_;
  const std::string where_;
  std::string token_;        ///< strangers do not know it
  base::UniqueFd listener_;  ///< of rank 0, until all have come
  bool may_accept_ = true;
  int arrived_ = 0;
  base::UniqueFd wake_;
  Events events_;
  std::mutex mutex_;
  std::vector<WatchLink> links_;  ///< of rank 0: to all who have come; of the others: to rank 0
  bool stop_ = false;
  bool is_copy_ = false;  ///< in a child that was forked: without the thread
  std::thread thread_;
};

}  // namespace syncbn::dist::detail
