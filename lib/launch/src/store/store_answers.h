#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "store/store_protocol.h"
#include "store/store_waiters.h"

namespace syncbn::launch {

/// The contents of a store and the answers to its clients' queries. Clients are numbers; their
/// connections are the server's business. Keys are as on the wire. Not thread-safe.
class StoreAnswers {
 public:
  /// Sends store::kStopWaiting to a client whose wait is over.
  using Wake = std::function<void(uint64_t client)>;

  explicit StoreAnswers(Wake wake) : wake_(std::move(wake)) {}

  /// @param query complete, and not kValidate. @param out receives the answer, if there is one now.
  /// @return false if the query is not allowed.
  bool answer(uint64_t client, std::string_view query, std::string& out);
  /// Removes a client that has disconnected.
  void remove(uint64_t client) { waiters_.remove(client); }

  /// Whether the key has a value or a queue with values.
  bool has(const std::string& key) const;
  /// Null if the key has no value.
  const std::string* find(const std::string& key) const;
  void set(const std::string& key, std::string value);
  /// Returns the sum; empty if the value is not an integer or the sum overflows.
  std::optional<int64_t> add(const std::string& key, int64_t amount);
  /// Removes all keys.
  void clear();

 private:
  bool answer_for_key(const std::string& key, store::Query kind, store::QueryReader& in,
                      uint64_t client, std::string& out);
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired);
  std::optional<int64_t> sum(const std::string& key, int64_t amount) const;
  bool put_values(std::string& out, const std::vector<std::string>& keys) const;
  size_t queue_length(const std::string& key) const;
  void pop(std::string& out, const std::string& key);
  bool enter_barrier(uint64_t client, const std::string& key, int64_t world_size, std::string& out);
  bool start_wait(uint64_t client, const std::vector<std::string>& keys, std::string& out);
  void wake(const std::vector<uint64_t>& clients);

  Wake wake_;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;  ///< none is empty
  StoreWaiters waiters_;
};

}  // namespace syncbn::launch
