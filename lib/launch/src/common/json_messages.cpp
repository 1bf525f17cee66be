#include "common/json_messages.h"

#include <syncbn/base/text.h>

#include <cerrno>

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

void send_message(base::Channel& channel, const Json& message) {
  send_line(channel, json_line(message), nullptr);
}

void send_line(base::Channel& channel, const std::string& line, base::MessageSeal* protection) {
  protection != nullptr ? protection->send(channel, line) : channel.send(line + "\n");
}

std::optional<Json> next_message(base::Channel& channel, size_t max_size,
                                 base::MessageSeal* protection) {
  const auto line = protection != nullptr ? protection->next_line(channel, max_size)
                                          : channel.next_line(max_size);
  if (!line) return std::nullopt;
  auto message = parse_json(*line);
  const auto type = message.find("type");
  if (type != message.end() && type->is_string()) return message;
  channel.fail(EBADMSG);
  return std::nullopt;
}

std::string shown_text(const Json& message, const char* key) {
  return shown_text(message.at(key).get_ref<const std::string&>());
}

std::string shown_text(std::string_view text) {
  constexpr size_t kMaxBytes = 1000;
  return base::printable(base::utf8_prefix(text, kMaxBytes));
}

}  // namespace syncbn::launch
