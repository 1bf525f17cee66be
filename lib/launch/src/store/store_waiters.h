#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace syncbn::launch {

/// The clients that wait for keys of a store. A client that waits for several keys wakes when the
/// last of them is set. Not thread-safe.
class StoreWaiters {
 public:
  bool waits(uint64_t id) const { return waits_.contains(id); }
  /// @param id must not wait yet. @param keys at least one.
  void add(uint64_t id, const std::vector<std::string>& keys);
  void remove(uint64_t id);

  /// Call it when a key is set. Returns the clients whose wait is over, in the order of add().
  std::vector<uint64_t> wake_all(const std::string& key);
  /// Call it when a value is pushed to a queue. Returns the first client whose wait is over, if
  /// any.
  std::vector<uint64_t> wake_one(const std::string& key);

 private:
  struct Wait {
    uint64_t ticket = 0;  ///< in the order of add()
    std::unordered_set<std::string> keys;
  };
  using Queue = std::map<uint64_t, uint64_t>;  ///< client by ticket

  bool end_wait_for(uint64_t id, const std::string& key);

  uint64_t last_ticket_ = 0;
  std::unordered_map<uint64_t, Wait> waits_;
  std::unordered_map<std::string, Queue> queues_;
};

}  // namespace syncbn::launch
