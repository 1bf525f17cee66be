#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "store/store_protocol.h"

namespace syncbn::launch {

/// The contents of a store and the answers to its clients' queries. Clients are numbers; their
/// connections are the server's business. Keys are as on the wire. Not thread-safe.
class StoreAnswers {
 public:
  /// Sends store::kStopWaiting to a client whose wait is over.
  using Wake = std::function<void(uint64_t client)>;

  /// @param max_bytes of an answer.
  StoreAnswers(Wake wake, size_t max_bytes) : wake_(std::move(wake)), max_answer_(max_bytes) {}

  /// @param query complete, and not kValidate. @param out receives the answer, if there is one now.
  /// @return false if the query is not allowed.
  bool answer(uint64_t client, std::string_view query, std::string& out);
  /// Ends its wait, if it waits.
  void remove(uint64_t client);
  /// About how much memory keys, values, queues and waits take.
  size_t bytes() const { return bytes_; }

  /// Whether the key has a value or a queue with values.
  bool has(const std::string& key) const;
  /// Null if the key has no value.
  const std::string* find(const std::string& key) const;
  void set(const std::string& key, std::string value);
  /// Returns the sum; empty if the value is not an integer or the sum overflows.
  std::optional<int64_t> add(const std::string& key, int64_t amount);
  void clear();

 private:
  /// A client that waits for several keys wakes when the last of them is set.
  struct Wait {
    uint64_t ticket = 0;  ///< in the order of the waits' begin
    std::unordered_set<std::string> keys;
    size_t bytes = 0;
  };
  using Queue = std::map<uint64_t, uint64_t>;  ///< client by ticket

  void put_value(const std::string& key, std::string value);
  void append(const std::string& key, const std::string& more);
  size_t erase(const std::string& key);
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired);
  std::optional<int64_t> sum(const std::string& key, int64_t amount) const;
  bool put_values(std::string& out, const std::vector<std::string>& keys) const;
  size_t queue_length(const std::string& key) const;
  void push(const std::string& key, std::string value);
  void pop(std::string& out, const std::string& key);
  bool enter_barrier(uint64_t client, const std::string& key, int64_t world_size, std::string& out);
  bool start_wait(uint64_t client, const std::vector<std::string>& keys, std::string& out);
  void wait(uint64_t client, const std::vector<std::string>& keys);
  /// Call it when a key is set, or with a `max` of 1 when a value is pushed to a queue: wakes the
  /// first `max` clients that need wait no longer.
  void wake(const std::string& key, size_t max = SIZE_MAX);

  Wake wake_;
  size_t max_answer_;
  size_t bytes_ = 0;  ///< of all that follows
  std::unordered_map<std::string, std::string> values_;
  /// None is empty. Lists: an std::deque of one value takes 600 bytes.
  std::unordered_map<std::string, std::list<std::string>> queues_;
  uint64_t last_ticket_ = 0;
  std::unordered_map<uint64_t, Wait> waits_;        ///< by client
  std::unordered_map<std::string, Queue> waiting_;  ///< by key
};

}  // namespace syncbn::launch
