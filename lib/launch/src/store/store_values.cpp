#include "store/store_values.h"

#include <syncbn/base/text.h>

#include <algorithm>
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
  auto number = base::parse_number<int64_t>(*value);
  if (!number || __builtin_add_overflow(*number, amount, &*number)) return std::nullopt;
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
