#include "common/json_messages.h"

#include <syncbn/base/text.h>

#include <cerrno>
#include <nlohmann/json.hpp>

namespace syncbn::launch {

using Json = nlohmann::json;

void send_message(base::Channel& channel, const Json& message, base::LinkProtection* protection) {
  const std::string line = message.dump(-1, ' ', false, Json::error_handler_t::replace);
  protection != nullptr ? protection->send(channel, line) : channel.send(line + "\n");
}

std::optional<Json> next_message(base::Channel& channel, size_t max_size,
                                 base::LinkProtection* protection) {
  const auto line = protection != nullptr ? protection->next_line(channel, max_size)
                                          : channel.next_line(max_size);
  if (!line) return std::nullopt;
  auto message = Json::parse(*line, nullptr, /*allow_exceptions=*/false);
  const auto type = message.find("type");
  if (type != message.end() && type->is_string()) return message;
  channel.fail(EBADMSG);
  return std::nullopt;
}

std::string shown_text(const Json& message, const char* key) {
  constexpr size_t kMaxBytes = 1000;
  return base::printable(
      base::utf8_prefix(message.at(key).get_ref<const std::string&>(), kMaxBytes));
}

}  // namespace syncbn::launch
