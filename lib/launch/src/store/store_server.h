#pragma once

#include <syncbn/base/channel.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/descriptors.h"
#include "store/store_answers.h"

namespace syncbn::launch {

/// A TCPStore server that runs inside its owner's poll loop. It closes connections that break the
/// protocol, or send no greeting within kGreetingTimeout, and reads no further queries of a client
/// that does not read its answers. Keys are those of TCPStore's methods. Not thread-safe.
class StoreServer {
 public:
  static constexpr std::chrono::seconds kGreetingTimeout{10};

  struct Hooks {
    /// Receives each connection whose first byte is not that of TCPStore's greeting. The channel's
    /// input holds what it has sent so far. May call the server. Empty: the server closes these.
    std::function<void(base::Channel channel)> foreign = {};
    /// Whether to serve the client that is connected to this socket. Empty: any client.
    std::function<bool(int client)> admits = {};
  };

  /// @param max_bytes upper bound on the memory of keys, values, waits and unfinished queries, and
  /// on that of unread answers: the server closes the connection of a client that would exceed it,
  /// and says so in a notice.
  /// @throws base::UnavailableError if no descriptors are left.
  StoreServer(base::UniqueFd listener, size_t max_bytes, Hooks hooks);
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Readable when handle() has something to do.
  int fd() const { return watched_.fd(); }
  /// Processes a bounded number of events, without waiting.
  void handle();

  /// Lines for the user.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  /// Lines about clients that are kept out, of which there may be many.
  std::vector<std::string> take_refusals() { return std::exchange(refusals_, {}); }

  void set(std::string_view key, std::string value);
  std::optional<std::string> get(std::string_view key) const;
  /// Returns the sum. @throws base::UnavailableError if the value is not an integer, or the sum
  /// overflows.
  int64_t add(std::string_view key, int64_t amount);

  /// The number of connected TCPStore clients.
  size_t clients() const;

  /// Removes all keys and disconnects all clients, for the next attempt. Connections that may still
  /// turn out to be foreign stay.
  void clear();

 private:
  struct Connection {
    base::Channel channel;
    Clock::time_point deadline;  ///< of the greeting
    uint32_t events = EPOLLIN;   ///< watched
    bool greeted = false;
    size_t buffered = 0;          ///< its part of buffered_
    store::QueryScanner scanner;  ///< of the first query in the input

    /// Its first byte; kSilent: none has arrived yet. That of a client if the server has read it or
    /// the connection was closed.
    int first_byte() const;
    static constexpr int kSilent = -1;
  };

  bool accept_connections();
  void make_room();
  void drop_late_newcomers();
  void set_timer();
  void handle_connection(int fd);
  bool answer_queries(Connection& connection);
  bool answer(Connection& connection, std::string_view query);
  void flush(Connection& connection);
  void count_buffers(Connection& connection);
  /// Whether keys, values, waits and all buffers, which hold the query that is to be answered, are
  /// within the limit. If not, leaves a notice.
  bool has_room(const Connection& connection);
  void wake(int fd);
  base::Channel remove(Connection& connection);

  base::UniqueFd listener_;
  Hooks hooks_;
  WatchSet watched_{"cannot serve the store"};
  base::UniqueFd spare_;  ///< closed to accept and drop a connection when no descriptor is free
  base::UniqueFd timer_;  ///< of the first in newcomers_
  const size_t max_newcomers_;
  const size_t max_bytes_;
  std::unordered_map<int, Connection> connections_;  ///< by descriptor
  std::vector<int> newcomers_;                       ///< those that have not greeted, oldest first
  size_t buffered_ = 0;                              ///< bytes in the buffers of all connections
  StoreAnswers answers_;
  bool said_full_ = false;     ///< in this attempt
  bool said_crowded_ = false;  ///< in this attempt
  std::vector<std::string> notices_;
  std::vector<std::string> refusals_;
};

}  // namespace syncbn::launch
