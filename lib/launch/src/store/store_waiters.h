#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace syncbn::launch {

/// Who waits for which keys of a store, by a number of its own. Whoever waits for several is woken
/// by the last one that comes. Not thread-safe.
class StoreWaiters {
 public:
  bool waits(uint64_t id) const { return waits_.contains(id); }
  /// Behind all others. @param keys at least one. Not for one that waits already.
  void add(uint64_t id, const std::vector<std::string>& keys);
  void remove(uint64_t id);

  /// A key has come: those that have nothing more to wait for, in the order in which they began to.
  std::vector<uint64_t> wake_all(const std::string& key);
  /// One value has come, which is for one: the first of them, or nothing.
  std::vector<uint64_t> wake_one(const std::string& key);

 private:
  struct Wait {
    uint64_t ticket = 0;  ///< its place among all that wait
    std::unordered_set<std::string> keys;
  };
  using Queue = std::map<uint64_t, uint64_t>;  ///< who waits, by ticket

  bool key_came(uint64_t id, const std::string& key);

  uint64_t last_ticket_ = 0;
  std::unordered_map<uint64_t, Wait> waits_;
  std::unordered_map<std::string, Queue> queues_;
};

}  // namespace syncbn::launch
