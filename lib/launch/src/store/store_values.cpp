#include "store/store_values.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace syncbn::launch {

bool StoreValues::has(const std::string& key) const {
  return values_.contains(key) || queue_length(key) > 0;
}

bool StoreValues::has_all(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return has(key); });
}

std::vector<std::string> StoreValues::keys() const {
  std::vector<std::string> all;
  all.reserve(values_.size());
  for (const auto& [key, value] : values_) all.push_back(key);
  return all;
}

const std::string* StoreValues::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

std::optional<int64_t> StoreValues::sum(const std::string& key, int64_t amount) const {
  const std::string* const value = find(key);
  if (value == nullptr) return amount;
  int64_t number = 0;
  const char* const value_end = value->data() + value->size();
  const auto [end, error] = std::from_chars(value->data(), value_end, number);
  if (error != std::errc{} || end != value_end) return std::nullopt;
  if (__builtin_add_overflow(number, amount, &number)) return std::nullopt;
  return number;
}

size_t StoreValues::queue_length(const std::string& key) const {
  const auto found = queues_.find(key);
  return found == queues_.end() ? 0 : found->second.size();
}

std::optional<std::string> StoreValues::pop(const std::string& key) {
  const auto found = queues_.find(key);
  if (found == queues_.end()) return std::nullopt;
  std::string value = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
  return value;
}

void StoreValues::clear() {
  values_.clear();
  queues_.clear();
}

}  // namespace syncbn::launch
