#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/store_protocol.h"
#include "store/store_values.h"
#include "store/store_waiters.h"

namespace syncbn::launch {

/// Executes the queries of TCPStore's clients and composes the answers. A client is a number here;
/// connections are StoreServer's. Keys are those on the wire. Not thread-safe.
class StoreAnswers {
 public:
  /// Sends store::kStopWaiting to a client whose wait is over.
  using Wake = std::function<void(uint64_t client)>;

  explicit StoreAnswers(Wake wake) : wake_(std::move(wake)) {}

  /// @param query complete, not kValidate. @param out takes the answer, if it is due now.
  /// @return false if the query is not allowed.
  bool answer(uint64_t client, std::string_view query, std::string& out);
  /// Drops the waits of a client that has left.
  void forget(uint64_t client) { waiters_.remove(client); }

  const StoreValues& values() const { return values_; }
  void set(const std::string& key, std::string value);
  /// The sum; empty if the value is not an integer, or the sum overflows.
  std::optional<int64_t> add(const std::string& key, int64_t amount);
  /// Deletes all keys.
  void clear() { values_.clear(); }

 private:
  bool answer_about(const std::string& key, store::Query kind, store::QueryReader& in,
                    uint64_t client, std::string& out);
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired);
  bool put_values(std::string& out, const std::vector<std::string>& keys) const;
  void pop(std::string& out, const std::string& key);
  bool enter_barrier(uint64_t client, const std::string& key, int64_t world_size, std::string& out);
  bool start_wait(uint64_t client, const std::vector<std::string>& keys, std::string& out);
  void wake(const std::vector<uint64_t>& clients);

  Wake wake_;
  StoreValues values_;
  StoreWaiters waiters_;
};

}  // namespace syncbn::launch
