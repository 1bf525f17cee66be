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

/// What the queries of TCPStore's clients do, and what is answered. A client is a number here: of
/// connections this class knows nothing. Keys are those on the wire. Not thread-safe.
class StoreAnswers {
 public:
  /// Tells a client, by store::kStopWaiting, that what it waited for has come.
  using Wake = std::function<void(uint64_t client)>;

  explicit StoreAnswers(Wake wake) : wake_(std::move(wake)) {}

  /// @param query complete, and not kValidate. @param out takes the answer, if it is due now.
  /// @return false when a client must not ask that.
  bool answer(uint64_t client, std::string_view query, std::string& out);
  /// A client has left.
  void forget(uint64_t client) { waiters_.remove(client); }

  const StoreValues& values() const { return values_; }
  void set(const std::string& key, std::string value);
  /// The sum; nothing when the value is not an integer, or the sum is none.
  std::optional<int64_t> add(const std::string& key, int64_t amount);
  /// Forgets all keys.
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
