#include "store/store_answers.h"

#include <syncbn/base/text.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace syncbn::launch {

using store::put_field;
using store::Query;
using store::QueryReader;

// Upper bound on the memory of an entry besides key and value: the nodes of its containers.
static constexpr size_t kEntryBytes = 192;

bool StoreAnswers::answer(uint64_t client, std::string_view query, std::string& out) {
  QueryReader in(query);
  const Query kind = in.query();
  const std::string key = store::begins_with_key(kind) ? in.string() : "";
  switch (kind) {
    case Query::kSet:
      set(key, in.string());
      return true;
    case Query::kCompareSet: {
      const std::string expected = in.string();
      put_field(out, compare_set(key, expected, in.string()));
      return true;
    }
    case Query::kGet:
      return put_values(out, {key});
    case Query::kAdd: {
      const auto result = add(key, in.integer<int64_t>());
      if (result) put_field(out, *result);
      return result.has_value();
    }
    case Query::kDeleteKey:
      put_field(out, erase(key));
      return true;
    case Query::kAppend:
      append(key, in.string());
      return true;
    case Query::kQueuePush:
      push(key, in.string());
      return true;
    case Query::kQueuePop:
      pop(out, key);
      return true;
    case Query::kQueueLen:
      put_field(out, queue_length(key));
      return true;
    case Query::kBarrier:
      return enter_barrier(client, key, in.integer<int64_t>(), out);
    case Query::kPing:
      put_field(out, in.integer<uint32_t>());
      return true;
    case Query::kCheck: {
      const bool all =
          std::ranges::all_of(in.strings(), [this](const auto& one) { return has(one); });
      put_field(out, all ? store::kReady : store::kNotReady);
      return true;
    }
    case Query::kWait:
      return start_wait(client, in.strings(), out);
    case Query::kCancelWait:
      remove(client);
      put_field(out, store::kWaitCanceled);
      return true;
    case Query::kMultiGet:
      return put_values(out, in.strings());
    case Query::kMultiSet:
      for (auto pairs = in.integer<uint64_t>(); pairs > 0; --pairs) {
        const std::string one = in.string();
        set(one, in.string());
      }
      return true;
    case Query::kGetNumKeys:
      put_field(out, values_.size());
      return true;
    case Query::kListKeys:
      put_field(out, values_.size());
      for (const auto& one : values_) put_field(out, one.first);
      return true;
    case Query::kValidate:
      break;
  }
  return false;
}

bool StoreAnswers::has(const std::string& key) const {
  return values_.contains(key) || queue_length(key) > 0;
}

const std::string* StoreAnswers::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

size_t StoreAnswers::queue_length(const std::string& key) const {
  const auto found = queues_.find(key);
  return found == queues_.end() ? 0 : found->second.size();
}

void StoreAnswers::clear() {
  *this = StoreAnswers(std::move(wake_), max_answer_);
}

void StoreAnswers::put_value(const std::string& key, std::string value) {
  const auto [entry, is_new] = values_.try_emplace(key);
  if (is_new) bytes_ += key.size() + kEntryBytes;
  bytes_ += value.size() - entry->second.size();
  entry->second = std::move(value);
}

void StoreAnswers::append(const std::string& key, const std::string& more) {
  if (!values_.contains(key)) put_value(key, "");
  values_[key].append(more);
  bytes_ += more.size();
  wake(key);
}

size_t StoreAnswers::erase(const std::string& key) {
  const auto entry = values_.find(key);
  if (entry == values_.end()) return 0;
  bytes_ -= key.size() + entry->second.size() + kEntryBytes;
  values_.erase(entry);
  return 1;
}

void StoreAnswers::set(const std::string& key, std::string value) {
  put_value(key, std::move(value));
  wake(key);
}

std::string StoreAnswers::compare_set(const std::string& key, const std::string& expected,
                                      const std::string& desired) {
  const std::string* const value = find(key);
  // torch's server returns `expected` here as well, although it looks like a value.
  if (value == nullptr && !expected.empty()) return expected;
  if (value != nullptr && *value != expected) return *value;
  set(key, desired);
  return desired;
}

std::optional<int64_t> StoreAnswers::add(const std::string& key, int64_t amount) {
  const auto result = sum(key, amount);
  if (result) set(key, std::to_string(*result));
  return result;
}

std::optional<int64_t> StoreAnswers::sum(const std::string& key, int64_t amount) const {
  const std::string* const value = find(key);
  if (value == nullptr) return amount;
  auto number = base::parse_number<int64_t>(*value);
  if (!number || __builtin_add_overflow(*number, amount, &*number)) return std::nullopt;
  return number;
}

// Returns false if the answer would be too long: a query may name a large value many times.
bool StoreAnswers::put_values(std::string& out, const std::vector<std::string>& keys) const {
  const size_t before = out.size();
  for (const std::string& key : keys) {
    const std::string* const found = find(key);
    const std::string_view value = found == nullptr ? "" : std::string_view(*found);
    if (out.size() - before + value.size() > max_answer_) return false;
    put_field(out, value);
  }
  return true;
}

void StoreAnswers::push(const std::string& key, std::string value) {
  bytes_ += key.size() + value.size() + kEntryBytes;
  queues_[key].push_back(std::move(value));
  wake(key, 1);
}

void StoreAnswers::pop(std::string& out, const std::string& key) {
  put_field(out, queue_length(key));
  const auto found = queues_.find(key);
  if (found == queues_.end()) return;
  put_field(out, found->second.front());
  bytes_ -= key.size() + found->second.front().size() + kEntryBytes;
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
}

// Only the last client that enters a barrier wakes those that wait for its key.
bool StoreAnswers::enter_barrier(uint64_t client, const std::string& key, int64_t world_size,
                                 std::string& out) {
  const auto count = sum(key, 1);
  if (!count || waits_.contains(client)) return false;
  put_value(key, std::to_string(*count));
  if (*count < world_size) {
    wait(client, {key});
    return true;
  }
  wake(key);
  put_field(out, store::kStopWaiting);
  return true;
}

bool StoreAnswers::start_wait(uint64_t client, const std::vector<std::string>& keys,
                              std::string& out) {
  // A client could not tell the answers to two waits apart.
  if (waits_.contains(client)) return false;
  std::vector<std::string> missing;
  std::ranges::copy_if(keys, std::back_inserter(missing),
                       [this](const std::string& key) { return !has(key); });
  if (missing.empty()) {
    put_field(out, store::kStopWaiting);
  } else {
    wait(client, missing);
  }
  return true;
}

void StoreAnswers::wait(uint64_t client, const std::vector<std::string>& keys) {
  Wait& wait = waits_[client];
  wait.ticket = ++last_ticket_;
  wait.keys.insert(keys.begin(), keys.end());
  wait.bytes = kEntryBytes;
  for (const std::string& key : wait.keys) {
    wait.bytes += 2 * (key.size() + kEntryBytes);
    waiting_[key].emplace(wait.ticket, client);
  }
  bytes_ += wait.bytes;
}

void StoreAnswers::wake(const std::string& key, size_t max) {
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  Queue& queue = found->second;
  for (; max > 0 && !queue.empty(); queue.erase(queue.begin())) {
    const auto wait = waits_.find(queue.begin()->second);
    wait->second.keys.erase(key);
    if (!wait->second.keys.empty()) continue;
    --max;
    wake_(wait->first);
    bytes_ -= wait->second.bytes;
    waits_.erase(wait);
  }
  if (queue.empty()) waiting_.erase(found);
}

void StoreAnswers::remove(uint64_t client) {
  const auto wait = waits_.find(client);
  if (wait == waits_.end()) return;
  for (const std::string& key : wait->second.keys) {
    const auto queue = waiting_.find(key);
    queue->second.erase(wait->second.ticket);
    if (queue->second.empty()) waiting_.erase(queue);
  }
  bytes_ -= wait->second.bytes;
  waits_.erase(wait);
}

}  // namespace syncbn::launch
