#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace syncbn::launch {

/// A connection to the store of torchrun's agents, torch's TCPStore with either backend. Keys are
/// those of TCPStore's methods.
///
/// Every call returns by its deadline or throws base::UnavailableError, which names the store, the
/// query and the reason. After a missing or invalid answer the connection is closed and every
/// further call throws. Not thread-safe.
class StoreClient {
 public:
  enum class Retry { kUntilDeadline, kNever };
  /// @param retry after a failure: the store may start later. A server that is not a TCPStore is an
  /// error at once. The deadline does not limit the resolution of the host's name.
  static StoreClient connect(const std::string& host, int port, base::Deadline deadline,
                             Retry retry = Retry::kUntilDeadline);

  /// The store sends no answer: when set() returns, other clients may not see the value yet, but
  /// further calls on this connection do.
  void set(std::string_view key, std::string_view value, base::Deadline deadline);
  /// @param key must be set.
  std::string get(std::string_view key, base::Deadline deadline);
  /// Returns the sum. A store closes the connection if the value is not an integer.
  int64_t add(std::string_view key, int64_t amount, base::Deadline deadline);
  /// Registers this client: torch's server waits in its constructor for a number of clients.
  void register_client(base::Deadline deadline);
  /// A wait inside a poll loop: after start_wait(), call wait_done() when fd() is readable. No
  /// other call is allowed until wait_done() returns true.
  void start_wait(std::string_view key, base::Deadline deadline);
  /// Whether the key is set. Never waits.
  bool wait_done();
  int fd() const { return channel_.fd(); }
  /// Throws if the store has closed the connection. Sends nothing.
  void check_connection();

 private:
  explicit StoreClient(std::string name) : name_(std::move(name)) {}

  bool connect_once(const std::string& host, int port, base::Deadline deadline);
  /// Sends a query. @param what follows "cannot" in error messages.
  void ask(const std::string& what, std::string_view query, base::Deadline deadline);
  /// Reads what has arrived; returns whether the input has that many bytes.
  bool has_received(size_t size);
  std::string receive(size_t size, base::Deadline deadline);
  template <typename Integer>
  Integer receive_integer(base::Deadline deadline);
  [[noreturn]] void fail(std::string_view why) const;
  [[noreturn]] void disconnect(std::string_view why);

  base::Channel channel_;
  std::string name_;  ///< host:port
  std::string what_;
  bool waiting_ = false;
};

}  // namespace syncbn::launch
