#pragma once

#include <syncbn/base/unique_fd.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "send_buffer.h"
#include "store_protocol.h"

namespace syncbn::launch {

/// Serves TCPStore's protocol to any number of connections, inside its owner's poll loop. A
/// connection that breaks the protocol is closed; one that does not read its answers is not read
/// from. Not thread-safe.
///
/// The keys of the member functions are those of TCPStore's methods.
class StoreServer {
 public:
  /// Takes a connection that does not begin as a store's client does, and the bytes that it has
  /// sent so far, at least one. It is non-blocking.
  using ForeignSink = std::function<void(base::UniqueFd connection, std::string first_bytes)>;

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
  using Waiters = std::map<uint64_t, Connection*>;  ///< in the order in which they came

  bool accept_connections();
  static bool may_be_foreign(const Connection& connection);
  static bool is_silent(const Connection& connection);
  void make_room();
  void drop_newcomer();
  void handle_connection(uint64_t id, uint32_t events);
  bool read(Connection& connection);
  bool answer_queries(Connection& connection);
  bool has_room(Connection& connection);
  bool answer(Connection& connection, std::string_view query);
  bool answer_about(const std::string& key, store::Query kind, store::QueryReader& in,
                    Connection& connection);
  void flush(Connection& connection);
  void watch(Connection& connection);
  base::UniqueFd take(Connection& connection);

  // From here on keys are those on the wire.
  bool has(const std::string& key) const;
  bool has_all(const std::vector<std::string>& keys) const;
  size_t queue_length(const std::string& key) const;
  void set_value(const std::string& key, std::string value);
  std::string compare_set(const std::string& key, const std::string& expected, std::string desired);
  std::optional<int64_t> sum(const std::string& key, int64_t amount) const;
  std::optional<int64_t> add_to(const std::string& key, int64_t amount);
  bool put_values(std::string& out, const std::vector<std::string>& keys) const;
  void pop(std::string& out, const std::string& key);

  bool enter_barrier(Connection& connection, const std::string& key, int64_t world_size);
  bool start_wait(Connection& connection, const std::vector<std::string>& keys);
  void add_waiter(Connection& connection, const std::string& key);
  void cancel_wait(Connection& connection);
  void wake_all(const std::string& key);
  void wake_one(const std::string& key);
  bool key_came(Connection& connection, const std::string& key);

  base::UniqueFd listener_;
  ForeignSink foreign_;
  base::UniqueFd epoll_;
  base::UniqueFd spare_;  ///< given up for a moment when no descriptor is left
  const size_t most_silent_;
  uint64_t last_id_ = 0;
  uint64_t last_ticket_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
  std::unordered_map<std::string, Waiters> waiters_;
};

}  // namespace syncbn::launch
