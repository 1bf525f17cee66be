#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace syncbn::launch {

/// The clients that wait for keys of a store. The last of its keys wakes a client. Not thread-safe.
class StoreWaiters {
 public:
  bool waits(uint64_t id) const { return waits_.contains(id); }
  /// Adds a client at the end. @param keys at least one. The client must not wait already.
  void add(uint64_t id, const std::vector<std::string>& keys);
  void remove(uint64_t id);

  /// A key was set. Returns the clients whose wait is over, in the order of their arrival.
  std::vector<uint64_t> wake_all(const std::string& key);
  /// A queue got one value. Returns the first client that waits for it; empty: none does.
  std::vector<uint64_t> wake_one(const std::string& key);

 private:
  struct Wait {
    uint64_t ticket = 0;  ///< its place in the order of arrival
    std::unordered_set<std::string> keys;
  };
  using Queue = std::map<uint64_t, uint64_t>;  ///< clients by ticket

  bool key_came(uint64_t id, const std::string& key);

  uint64_t last_ticket_ = 0;
  std::unordered_map<uint64_t, Wait> waits_;
  std::unordered_map<std::string, Queue> queues_;
};

}  // namespace syncbn::launch
