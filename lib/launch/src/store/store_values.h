#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace syncbn::launch {

/// A store's values and queues by key, as in TCPStore's server. Keys are those on the wire. Not
/// thread-safe.
class StoreValues {
 public:
  /// Whether the key has a value or a queue that is not empty.
  bool has(const std::string& key) const;
  bool has_all(const std::vector<std::string>& keys) const;
  /// The number of values.
  size_t size() const { return values_.size(); }
  std::vector<std::string> keys() const;

  /// Null if there is none.
  const std::string* find(const std::string& key) const;
  void set(const std::string& key, std::string value) { values_[key] = std::move(value); }
  void append(const std::string& key, const std::string& text) { values_[key].append(text); }
  size_t erase(const std::string& key) { return values_.erase(key); }
  /// The value after an addition, not stored; empty if it is not an integer, or the sum overflows.
  std::optional<int64_t> sum(const std::string& key, int64_t amount) const;

  size_t queue_length(const std::string& key) const;
  void push(const std::string& key, std::string value) { queues_[key].push_back(std::move(value)); }
  /// Removes and returns the oldest; empty if the queue is.
  std::optional<std::string> pop(const std::string& key);

  void clear();

 private:
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
};

}  // namespace syncbn::launch
