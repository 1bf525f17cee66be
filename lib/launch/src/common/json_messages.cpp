#include "common/json_messages.h"

#include <syncbn/base/text.h>

#include <cerrno>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace syncbn::launch {

using Json = nlohmann::json;

Json parse_json(std::string_view text) {
  constexpr int kMaxDepth = 100;
  bool is_too_deep = false;
  const auto goes_on = [&](int depth, Json::parse_event_t /*event*/, Json& /*parsed*/) {
    is_too_deep = is_too_deep || depth > kMaxDepth;
    return !is_too_deep;
  };
  Json json = Json::parse(text, goes_on, /*allow_exceptions=*/false);
  return is_too_deep ? Json(Json::value_t::discarded) : json;
}

void send_message(base::Channel& channel, const Json& message, base::LinkProtection* protection) {
  send_line(channel, json_line(message), protection);
}

void send_line(base::Channel& channel, const std::string& line, base::LinkProtection* protection) {
  protection != nullptr ? protection->send(channel, line) : channel.send(line + "\n");
}

std::optional<Json> next_message(base::Channel& channel, size_t max_size,
                                 base::LinkProtection* protection) {
  const auto line = protection != nullptr ? protection->next_line(channel, max_size)
                                          : channel.next_line(max_size);
  if (!line) return std::nullopt;
  auto message = parse_json(*line);
  const auto type = message.find("type");
  if (type != message.end() && type->is_string()) return message;
  channel.fail(EBADMSG);
  return std::nullopt;
}

Json runs_of(const std::vector<int>& ranks) {
  Json runs = Json::array();
  for (size_t first = 0, end; first < ranks.size(); first = end) {
    end = first + 1;
    const int step = end < ranks.size() ? ranks[end] - ranks[first] : 1;
    while (end < ranks.size() && ranks[end] - ranks[end - 1] == step) ++end;
    runs.push_back({ranks[first], end - first, step});
  }
  return runs;
}

std::vector<int> ranks_in_runs(const Json& runs, size_t max_count) {
  std::vector<int> ranks;
  for (const Json& run : runs) {
    int64_t rank = run.at(0).get<int>();
    const auto count = run.at(1).get<uint64_t>();
    const int64_t step = run.at(2).get<int>();
    for (uint64_t i = 0; i < count && rank >= 0 && rank < kMaxRanks; ++i, rank += step) {
      if (ranks.size() == max_count) return ranks;
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

std::string shown_text(const Json& message, const char* key) {
  return shown_text(message.at(key).get_ref<const std::string&>());
}

std::string shown_text(std::string_view text) {
  constexpr size_t kMaxBytes = 1000;
  return base::printable(base::utf8_prefix(text, kMaxBytes));
}

}  // namespace syncbn::launch
