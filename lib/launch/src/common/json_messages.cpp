#include "common/json_messages.h"

#include <syncbn/base/text.h>

#include <cerrno>

namespace syncbn::launch {

using Json = nlohmann::json;

namespace {

// Exact up to the first error, where the parser stops.
bool is_too_deep(std::string_view text) {
  constexpr int kMaxDepth = 100;
  int depth = 0;
  bool is_quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') is_quoted = !is_quoted;
    if (is_quoted && c == '\\') ++i;
    if (is_quoted) continue;
    if ((c == '[' || c == '{') && ++depth > kMaxDepth) return true;
    if (c == ']' || c == '}') --depth;
  }
  return false;
}

}  // namespace

Json parse_json(std::string_view text) {
  // A callback that looks at the depth would double the time of parsing.
  if (is_too_deep(text)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
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
