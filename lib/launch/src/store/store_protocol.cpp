#include "store/store_protocol.h"

#include <array>
#include <limits>

namespace syncbn::launch::store {
namespace {

// The fields of each query, by its number. 'm': 4 bytes, 'i': 8 bytes, 'k': a key, 'v': a value,
// '*': a count; the rest is repeated that many times.
constexpr std::array<std::string_view, 19> kLayouts{
    "m",  "kv",  "kvv", "k", "ki", "*k", "*k", "", "k",  "kv",  // kValidate to kAppend
    "*k", "*kv", "",    "m", "kv", "k",  "k",  "", "ki",        // kMultiGet to kBarrier
};
static_assert(kLayouts.size() == static_cast<size_t>(Query::kBarrier) + 1);

uint64_t limit(char field) {
  if (field == 'k') return kMaxKeySize;
  if (field == 'v') return kMaxValueSize;
  return field == '*' ? kMaxKeys : std::numeric_limits<uint64_t>::max();
}

}  // namespace

bool begins_with_key(Query query) {
  return kLayouts.at(static_cast<size_t>(query)).starts_with('k');
}

QueryScanner::Result QueryScanner::scan(std::string_view bytes) {
  if (at_ == 0) {
    if (bytes.empty()) return Result::kIncomplete;
    const auto query = static_cast<uint8_t>(bytes.front());
    if (query >= kLayouts.size()) return Result::kMalformed;
    item_ = rest_ = kLayouts[query];
    items_ = 1;
    at_ = 1;
  }
  while (items_ > 0) {
    if (rest_.empty()) {
      --items_;
      rest_ = item_;
      continue;
    }
    const char field = rest_.front();
    size_t size = field == 'm' ? sizeof(uint32_t) : sizeof(uint64_t);
    if (bytes.size() - at_ < size) return Result::kIncomplete;
    if (field != 'm') {
      const auto number = integer_at<uint64_t>(bytes.substr(at_));
      if (number > limit(field)) return Result::kMalformed;
      if (field == '*') {
        items_ = number;
        item_ = rest_.substr(1);
      } else if (field != 'i') {
        size += number;
      }
    }
    if (at_ + size > kMaxMessageSize) return Result::kMalformed;
    if (bytes.size() - at_ < size) return Result::kIncomplete;
    at_ += size;
    rest_.remove_prefix(1);
  }
  return Result::kComplete;
}

}  // namespace syncbn::launch::store
