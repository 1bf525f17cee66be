#pragma once

#include <syncbn/base/channel.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace syncbn::launch {

/// A connection to a store: ours, or torch's TCPStore with either backend. Keys are those of
/// TCPStore's methods.
///
/// Every call returns by its deadline or throws base::UnavailableError, which names the store, the
/// query and the cause. After a missing or invalid answer the connection is closed, and every
/// further call throws; a wait that timed out leaves it usable. Not thread-safe.
class StoreClient {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// Retries until the deadline, as the store may start later; tries at least once. A listener that
  /// is not a store is an error at once. The deadline does not limit name resolution.
  static StoreClient connect(const std::string& host, int port, TimePoint deadline);

  /// Does not wait for the store. Later calls on this connection see the value.
  void set(std::string_view key, std::string_view value, TimePoint deadline);
  /// Waits for the value.
  std::string get(std::string_view key, TimePoint deadline);
  /// Waits for all values.
  std::vector<std::string> multi_get(const std::vector<std::string>& keys, TimePoint deadline);
  /// Returns the sum. A store closes the connection if the value is not an integer.
  int64_t add(std::string_view key, int64_t amount, TimePoint deadline);
  /// Announces this client: torch's server waits for a number of clients in its constructor.
  void count_in(TimePoint deadline);
  /// Whether all keys exist.
  bool check(const std::vector<std::string>& keys, TimePoint deadline);
  /// Waits until all keys exist.
  void wait(const std::vector<std::string>& keys, TimePoint deadline);
  /// Sets `desired` if the value is `expected`, or if there is none and `expected` is empty.
  /// Returns the value now; `expected` if there is none.
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          TimePoint deadline);
  /// Whether the key existed.
  bool delete_key(std::string_view key, TimePoint deadline);

  /// For a wait in a poll loop: after start_wait(), poll fd() for POLLIN and call wait_done(). No
  /// other call is allowed until that returns true, or before cancel_wait().
  void start_wait(const std::vector<std::string>& keys, TimePoint deadline);
  /// Whether all keys exist now. Never waits.
  bool wait_done();
  /// Ends the wait. Returns whether the keys arrived in the meantime.
  bool cancel_wait(TimePoint deadline);
  int fd() const { return channel_.fd(); }
  /// Throws if the store is gone. Sends nothing.
  void check_connection();

 private:
  explicit StoreClient(std::string name) : name_(std::move(name)) {}

  bool connect_once(const std::string& host, int port, TimePoint deadline);
  /// Sends a query. `what` follows "cannot" in messages about the query and its answer.
  void ask(const std::string& what, std::string_view query, TimePoint deadline);
  void ask_and_wait(const std::string& what, const std::vector<std::string>& keys,
                    TimePoint deadline);
  /// Reads what has arrived. Returns whether the input has that many bytes.
  bool has_received(size_t size);
  std::string receive(size_t size, TimePoint deadline);
  std::string receive_string(TimePoint deadline);
  template <typename Integer>
  Integer receive_integer(TimePoint deadline);
  [[noreturn]] void fail(std::string_view why) const;
  [[noreturn]] void disconnect(std::string_view why);

  base::Channel channel_;
  std::string name_;  ///< host:port
  std::string what_;
  bool waiting_ = false;
};

}  // namespace syncbn::launch
