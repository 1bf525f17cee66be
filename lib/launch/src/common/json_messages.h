#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/message_seal.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace syncbn::launch {

/// Parses JSON from another process or a file. Returns a discarded value if it is invalid, or so
/// deeply nested that nlohmann's recursive functions would overflow the stack.
nlohmann::json parse_json(std::string_view text);

/// One line of JSON. Bytes that are not UTF-8, as in a worker's output, are replaced.
template <class Json>
std::string json_line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Sends one line of JSON, an object with a "type". Bytes that are not UTF-8 are replaced.
void send_message(base::Channel& channel, const nlohmann::json& message);
/// Sends a message that is already serialised.
/// @param protection of this connection; null: there is none.
void send_line(base::Channel& channel, const std::string& line, base::MessageSeal* protection);

/// Returns the next message if it is complete. An invalid message, or one that `protection`
/// rejects, ends the channel with EBADMSG; one above `max_size` bytes, with EMSGSIZE.
std::optional<nlohmann::json> next_message(base::Channel& channel, size_t max_size = SIZE_MAX,
                                           base::MessageSeal* protection = nullptr);

/// Explains EBADMSG in error messages.
inline constexpr const char* kBadMessage =
    "a message that is damaged or not its own: another program writes into the connection, or a "
    "proxy changes it";

/// The text at `key`, made safe to show or log: one line, without control characters, and at most
/// 1,000 bytes. @throws nlohmann's exceptions if there is none.
std::string shown_text(const nlohmann::json& message, const char* key);
std::string shown_text(std::string_view text);

/// Text of a message. What another process sends becomes safe to show or log, as shown_text() says.
struct ShownText : std::string {
  using std::string::string;
  ShownText(std::string text) : std::string(std::move(text)) {}
};

inline void from_json(const nlohmann::json& json, ShownText& text) {
  text = shown_text(json.get_ref<const std::string&>());
}

constexpr int kMaxRanks = 1'000'000;  ///< upper bound on the ranks in a record or a message

}  // namespace syncbn::launch
