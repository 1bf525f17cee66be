#pragma once

#include <syncbn/base/channel.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "store/store_answers.h"

namespace syncbn::launch {

/// A TCPStore server that runs inside its owner's poll loop. It closes connections that break the
/// protocol, and reads no further queries of a client that does not read its answers. Keys are
/// those of TCPStore's methods. Not thread-safe.
class StoreServer {
 public:
  /// Receives each connection whose first byte is not that of TCPStore's greeting. The channel's
  /// input holds what it has sent so far.
  using ForeignSink = std::function<void(base::Channel channel)>;

  /// @param foreign may call this object. Empty: the server closes foreign connections.
  /// @throws base::UnavailableError if no descriptors are left.
  explicit StoreServer(base::UniqueFd listener, ForeignSink foreign = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Readable when handle() has something to do.
  int fd() const { return epoll_.get(); }
  /// Processes a bounded number of events, without waiting.
  void handle();

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
  struct Connection;

  bool accept_connections();
  void make_room();
  void drop_newcomer();
  void handle_connection(uint64_t id, uint32_t events);
  bool answer_queries(Connection& connection);
  bool answer(Connection& connection, std::string_view query);
  void flush(Connection& connection);
  void wake(uint64_t id);
  base::Channel remove(Connection& connection);

  base::UniqueFd listener_;
  ForeignSink foreign_;
  base::UniqueFd epoll_;
  base::UniqueFd spare_;  ///< closed to accept and drop a connection when no descriptor is free
  const size_t max_silent_;
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  StoreAnswers answers_;
};

}  // namespace syncbn::launch
