#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/handshake.h>
#include <syncbn/base/message_seal.h>
#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace syncbn::dist::detail {

/// A message between ranks outside of collectives. On the wire it is a line of tab-separated
/// fields.
struct Message {
  static constexpr int kAll = -1;

  int from = 0;
  int to = kAll;
  std::string type;
  std::vector<std::string> fields;

  /// Without a newline. Control characters in fields become blanks.
  std::string line() const;
  /// @param line without the newline. Empty if line() cannot have made it.
  static std::optional<Message> parse(const std::string& line);
  /// Empty if there is no such field.
  std::string field(size_t index) const { return index < fields.size() ? fields[index] : ""; }
  /// 0 if there is no such field, or it is not a number.
  uint64_t number(size_t index) const;
};

/// One end of a connection between rank 0 and another rank. Ranks to which the launcher has given a
/// secret (base::job_secret()) prove to each other that they know it, before they parse any
/// message.
struct MonitorLink {
  /// @param side kClient connects to rank 0.
  MonitorLink(base::UniqueFd fd, base::Handshake::Side side, int peer = -1, std::string where = "");

  /// Processes the lines of the handshake that have arrived. Returns whether messages may follow.
  bool shake_hands();
  void send(const std::string& line);
  /// The next line, if it is complete.
  std::optional<std::string> next_line(size_t max_size);

  base::Channel channel;
  base::Handshake handshake;
  std::unique_ptr<base::MessageSeal> protection;  ///< once the handshake is done
  bool is_ready = true;  ///< poll() has reported an event, or has not been called yet
  /// The rank at the other end; -1 before its hello.
  int peer;
  std::string where;  ///< the peer's host and process: "host, process 7"
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
};

/// Carries messages between ranks and reports when a rank has ended. Every rank keeps one
/// connection to rank 0, which forwards messages; the connection ends with the process.
/// Thread-safe; has one thread, which sleeps in poll().
class MonitorChannel {
 public:
  /// Callbacks; the channel's thread calls them.
  struct Events {
    std::function<void(const Message&)> message;
    /// The process of a rank has ended, or its host does not answer. @param where as in MonitorLink
    std::function<void(int rank, const std::string& where)> end;
    std::function<void()> tick;  ///< four times a second
  };

  /// Every rank of the world calls it.
  /// @param address of this host, for other hosts.
  /// @throws base::UnavailableError if rank 0 does not answer within `limit`, or does not know the
  ///   secret of this rank's launcher; base::UserError if only rank 0 has a secret.
  MonitorChannel(c10d::Store& store, int rank, int world_size, const std::string& address,
                 std::chrono::milliseconds limit);
  ~MonitorChannel();
  MonitorChannel(const MonitorChannel&) = delete;
  MonitorChannel& operator=(const MonitorChannel&) = delete;

  void start(Events events);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& where() const { return where_; }  ///< as in MonitorLink

  /// Sends a message to a rank, or to all ranks but this one. Does not wait.
  void post(int to, const std::string& type, std::vector<std::string> fields);
  /// Waits for at most `limit` until the kernel has taken every message from the send buffers.
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
  void refuse(MonitorLink& link);
  void drop_strangers();
  void dispatch(const Message& message);
  void follow_forks();
  void close_in_child();

  const int rank_;
  const int world_size_;
  const std::string where_;
  std::string token_;        ///< a secret of the job's ranks
  base::UniqueFd listener_;  ///< on rank 0, until all ranks have connected
  bool may_accept_ = true;
  bool has_refused_ = false;
  int arrived_ = 0;
  base::UniqueFd wake_;
  Events events_;
  std::mutex mutex_;
  std::vector<MonitorLink> links_;  ///< on rank 0 to every connected rank; elsewhere to rank 0
  bool stop_ = false;
  bool is_copy_ = false;  ///< in a forked child, which does not have the thread
  std::thread thread_;
};

}  // namespace syncbn::dist::detail
