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

/// Serves TCPStore's protocol to any number of connections, inside its owner's poll loop. A
/// connection that breaks the protocol is closed; one that does not read its answers is not read
/// from. Not thread-safe.
///
/// The keys of the member functions are those of TCPStore's methods.
class StoreServer {
 public:
  /// Takes a connection that does not begin as a store's client does. Its input, at least a byte,
  /// is what it has sent so far.
  using ForeignSink = std::function<void(base::Channel channel)>;

  /// @param listener a socket that listens.
  /// @param foreign without it such connections are closed. It may call this object.
  /// @throws base::UnavailableError when the system has no descriptors left.
  explicit StoreServer(base::UniqueFd listener, ForeignSink foreign = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  /// Readable when handle() has something to do.
  int fd() const { return epoll_.get(); }
  /// Does what is due, without waiting. It leaves some for the next call when there is much.
  void handle();

  void set(std::string_view key, std::string value);
  std::optional<std::string> get(std::string_view key) const;
  /// The sum. @throws base::UnavailableError when the value is not an integer, or the sum is none.
  int64_t add(std::string_view key, int64_t amount);
  /// Whether all of the keys are there.
  bool check(const std::vector<std::string>& keys) const;

  /// Connections that have greeted as a store's client does.
  size_t clients() const;

  /// Forgets all keys and closes the connections of all clients, so that the next attempt finds a
  /// fresh store. A connection that may still turn out to be foreign stays.
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
  base::UniqueFd spare_;  ///< given up for a moment when no descriptor is left
  const size_t most_silent_;
  uint64_t last_id_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  StoreAnswers answers_;
};

}  // namespace syncbn::launch
