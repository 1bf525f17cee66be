#include "store/store_waiters.h"

namespace syncbn::launch {

void StoreWaiters::add(uint64_t id, const std::vector<std::string>& keys) {
  Wait& wait = waits_[id];
  wait.ticket = ++last_ticket_;
  wait.keys.insert(keys.begin(), keys.end());
  for (const std::string& key : keys) queues_[key].emplace(wait.ticket, id);
}

void StoreWaiters::remove(uint64_t id) {
  const auto wait = waits_.find(id);
  if (wait == waits_.end()) return;
  for (const std::string& key : wait->second.keys) {
    const auto queue = queues_.find(key);
    queue->second.erase(wait->second.ticket);
    if (queue->second.empty()) queues_.erase(queue);
  }
  waits_.erase(wait);
}

std::vector<uint64_t> StoreWaiters::wake_all(const std::string& key) {
  std::vector<uint64_t> woken;
  const auto queue = queues_.extract(key);
  if (queue.empty()) return woken;
  for (const auto& [ticket, id] : queue.mapped()) {
    if (end_wait_for(id, key)) woken.push_back(id);
  }
  return woken;
}

std::vector<uint64_t> StoreWaiters::wake_one(const std::string& key) {
  std::vector<uint64_t> woken;
  const auto found = queues_.find(key);
  if (found == queues_.end()) return woken;
  Queue& queue = found->second;
  for (; woken.empty() && !queue.empty(); queue.erase(queue.begin())) {
    const uint64_t id = queue.begin()->second;
    if (end_wait_for(id, key)) woken.push_back(id);
  }
  if (queue.empty()) queues_.erase(found);
  return woken;
}

// Returns whether the client waits for no other key.
bool StoreWaiters::end_wait_for(uint64_t id, const std::string& key) {
  const auto wait = waits_.find(id);
  wait->second.keys.erase(key);
  if (!wait->second.keys.empty()) return false;
  waits_.erase(wait);
  return true;
}

}  // namespace syncbn::launch
