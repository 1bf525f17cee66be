#pragma once

#include <syncbn/base/channel.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Proves to the other end of a link that messages come from this end, unchanged, in order and
/// without a gap: each carries the HMAC-SHA256 of its number and text, with a key for this
/// connection and direction. Not thread-safe.
class MessageSeal {
 public:
  MessageSeal(std::string own_key, std::string others_key);

  /// @param line without a newline.
  void send(Channel& channel, std::string_view line);
  /// The other end's next line, if it is complete. The channel fails with EBADMSG if the other end
  /// has not sealed the line, and with EMSGSIZE if an incomplete line has more than `max_size`
  /// bytes.
  std::optional<std::string> next_line(Channel& channel, size_t max_size);

  /// The line to send for `text`, which is one line itself.
  std::string seal(std::string_view text);
  /// The text of a sealed line; std::nullopt if the line is not the other end's next message. The
  /// number then does not advance, so that messages after a lost one fail as well.
  std::optional<std::string> open(std::string_view line);

 private:
  std::string own_key_;
  std::string others_key_;
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
};

}  // namespace syncbn::base
