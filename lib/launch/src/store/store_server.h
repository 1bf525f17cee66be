#pragma once

#include <syncbn/base/channel.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "store/store_answers.h"

namespace syncbn::launch {

/// Serves TCPStore's protocol to any number of connections, inside its owner's poll loop. It closes
/// a connection that breaks the protocol, and does not read from one that does not read its
/// answers. Not thread-safe.
///
/// The keys of the member functions are those of TCPStore's methods.
class StoreServer {
 public:
  /// Takes a connection whose first byte is not that of a store's client. Its input holds what it
  /// has sent so far, at least a byte.
  using ForeignSink = std::function<void(base::Channel channel)>;

  /// @param listener a socket that listens.
  /// @param foreign may be empty: such connections are then closed. May call this object.
  /// @throws base::UnavailableError when the system has no descriptors left.
  explicit StoreServer(base::UniqueFd listener, ForeignSink foreign = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Readable when handle() has something to do.
  int fd() const { return epoll_.get(); }
  /// Does what is due without waiting. Leaves the rest of much work to the next call.
  void handle();

  void set(std::string_view key, std::string value);
  std::optional<std::string> get(std::string_view key) const;
  /// Returns the sum. @throws base::UnavailableError if the value is not an integer, or the sum
  /// overflows.
  int64_t add(std::string_view key, int64_t amount);
  /// Whether all keys exist.
  bool check(const std::vector<std::string>& keys) const;

  /// The number of connections that have sent the greeting of a store's client.
  size_t clients() const;

  /// Deletes all keys and closes all clients' connections: a fresh store for the next attempt.
  /// Connections that may still turn out to be foreign stay.
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
  void watch(Connection& connection);
  void wake(uint64_t id);
  base::Channel remove(Connection& connection);

  base::UniqueFd listener_;
  ForeignSink foreign_;
  base::UniqueFd epoll_;
  base::UniqueFd spare_;  ///< closed for a moment when no descriptor is left
  const size_t most_silent_;
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  StoreAnswers answers_;
};

}  // namespace syncbn::launch
