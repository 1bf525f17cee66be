#include "job/record_message.h"

#include <algorithm>

#include "common/json_messages.h"

namespace syncbn::launch {
namespace {

using base::FlightLayout;
using Json = nlohmann::json;

constexpr size_t kMaxMessageBytes = size_t{512} << 10;

/// Keeps the calls that have not succeeded, then the latest, `count` in all; sorted by number.
void keep_calls(std::vector<RankRecord::Call>& calls, size_t count) {
  std::stable_partition(calls.begin(), calls.end(), [](const RankRecord::Call& call) {
    return call.state == FlightLayout::kSucceeded;
  });
  calls.erase(calls.begin(), calls.end() - static_cast<std::ptrdiff_t>(count));
  std::ranges::sort(calls, {}, &RankRecord::Call::number);
}

}  // namespace

RecordQuota RecordQuota::of(int world_size) {
  constexpr size_t kMaxCalls = 80'000;
  constexpr size_t kMinCalls = 10;
  constexpr size_t kMaxBytes = size_t{64} << 20;
  const auto ranks = static_cast<size_t>(std::max(world_size, 1));
  return {.calls = std::clamp(kMaxCalls / ranks, kMinCalls, FlightLayout::kCalls),
          .bytes = std::min(kMaxBytes / ranks, kMaxMessageBytes)};
}

std::optional<Json> record_message(RankRecord record, const RecordQuota& quota) {
  constexpr size_t kFrame = 100;  // bytes that a sender adds
  for (size_t count = std::min(quota.calls, record.calls.size()); count > 0;
       count = count * 3 / 4) {
    keep_calls(record.calls, count);
    Json message = json_of(record);
    message["type"] = "record";
    if (json_line(message).size() + kFrame <= quota.bytes) return message;
  }
  return std::nullopt;
}

std::string JobRecords::text() const {
  FlightFile head = file;
  head.unix_ns = base::unix_ns();
  FlightText lines;
  for (const auto& [rank, message] : messages) {
    if (const auto record = record_in(parse_json(message))) lines.add(*record);
  }
  return lines.text(head);
}

}  // namespace syncbn::launch
