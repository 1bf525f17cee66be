#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "monitor/monitor_message.h"

namespace syncbn::dist::detail {

/// One end of a connection between rank 0 and another rank.
struct MonitorLink {
  explicit MonitorLink(base::UniqueFd fd, int peer = -1, std::string where = "");

  base::Channel channel;
  /// The rank at the other end; -1 before its hello.
  int peer;
  /// "host, process 7": of the peer.
  std::string where;
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
};

/// Carries messages between ranks outside of collectives and reports when a rank has ended. Every
/// rank keeps one connection to rank 0, which forwards messages; the connection ends with the
/// process. Thread-safe; one thread, which sleeps in poll().
class MonitorChannel {
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
  MonitorChannel(c10d::Store& store, int rank, int world_size, const std::string& address,
                 std::chrono::milliseconds limit);
  ~MonitorChannel();
  MonitorChannel(const MonitorChannel&) = delete;
  MonitorChannel& operator=(const MonitorChannel&) = delete;

  /// Called once.
  void start(Events events);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// "host, process 7": of this rank.
  const std::string& where() const { return where_; }

  /// Sends a message to a rank, or to all but this one. Does not wait.
  void post(int to, const std::string& type, std::vector<std::string> fields);
  /// Waits until the kernel has all that was posted or is to be forwarded; at most `limit`.
  void flush(std::chrono::milliseconds limit);

 private:
  void listen(c10d::Store& store, const std::string& address);
  void connect(c10d::Store& store, std::chrono::milliseconds limit);
  void send(const Message& message);
  void run();
  void wait_for_events();
  void accept_links();
  std::vector<Message> read_links();
  void greet(MonitorLink& link, const std::optional<Message>& hello);
  void drop_strangers();
  void dispatch(const Message& message);
  void follow_forks();
  void close_in_child();

  const int rank_;
  const int world_size_;
  const std::string where_;
  std::string token_;        ///< only ranks of the job know it
  base::UniqueFd listener_;  ///< of rank 0, until all ranks have arrived
  bool may_accept_ = true;
  int arrived_ = 0;
  base::UniqueFd wake_;
  Events events_;
  std::mutex mutex_;
  std::vector<MonitorLink> links_;  ///< rank 0: to all ranks that have arrived; others: to rank 0
  bool stop_ = false;
  bool is_copy_ = false;  ///< in a forked child, which does not have the thread
  std::thread thread_;
};

}  // namespace syncbn::dist::detail
