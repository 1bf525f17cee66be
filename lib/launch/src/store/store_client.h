#pragma once

#include <syncbn/base/channel.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace syncbn::launch {

/// One connection to a store: ours, or torch's TCPStore of either backend. Keys are those of
/// TCPStore's methods.
///
/// Every call returns by its deadline or throws base::UnavailableError, which names the store, what
/// was asked and why it failed. After an answer that did not come or was none the connection is
/// closed, and every further call throws; a wait that ran out of time leaves it usable. Not
/// thread-safe.
class StoreClient {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// Tries until the deadline, at least once: the store may start later than we do. What answers
  /// as no store does is an error at once. Resolving the host's name is not bound by the deadline.
  static StoreClient connect(const std::string& host, int port, TimePoint deadline);

  /// The store does not answer this: the value may not be there yet when it returns, but it is for
  /// every further call on this connection.
  void set(std::string_view key, std::string_view value, TimePoint deadline);
  /// The value, once there is one.
  std::string get(std::string_view key, TimePoint deadline);
  /// The values, once there are all.
  std::vector<std::string> multi_get(const std::vector<std::string>& keys, TimePoint deadline);
  /// The sum. A store closes the connection when the value is no integer.
  int64_t add(std::string_view key, int64_t amount, TimePoint deadline);
  /// torch's own server waits in its constructor until so many clients have done this.
  void count_in(TimePoint deadline);
  /// Whether all of the keys are there.
  bool check(const std::vector<std::string>& keys, TimePoint deadline);
  /// Returns once all of the keys are there.
  void wait(const std::vector<std::string>& keys, TimePoint deadline);
  /// Sets `desired` where the value is `expected`, or where both there is none and `expected` is
  /// empty. The value now; `expected` when there is none.
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          TimePoint deadline);
  /// Whether there was one.
  bool delete_key(std::string_view key, TimePoint deadline);

  /// To wait beside other things: after start_wait() poll fd() for POLLIN and ask wait_done().
  /// Until it has said true, or cancel_wait() was called, no other call is allowed.
  void start_wait(const std::vector<std::string>& keys, TimePoint deadline);
  /// Whether all of the keys are there now. Never waits.
  bool wait_done();
  /// Ends the wait. Whether the keys came in the last moment.
  bool cancel_wait(TimePoint deadline);
  int fd() const { return channel_.fd(); }
  /// Asks nothing: throws when the store is gone.
  void check_connection();

 private:
  explicit StoreClient(std::string name) : name_(std::move(name)) {}

  bool connect_once(const std::string& host, int port, TimePoint deadline);
  /// Sends a query. `what` follows "cannot" in the messages about it and about its answer.
  void ask(const std::string& what, std::string_view query, TimePoint deadline);
  void ask_and_wait(const std::string& what, const std::vector<std::string>& keys,
                    TimePoint deadline);
  /// Reads what has arrived. Whether the input has that many bytes.
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
