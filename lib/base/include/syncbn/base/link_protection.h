#pragma once

#include <syncbn/base/channel.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Protects the lines of a link between two processes after the handshake. Not thread-safe.
class LinkProtection {
 public:
  LinkProtection() = default;
  virtual ~LinkProtection() = default;
  LinkProtection(const LinkProtection&) = delete;
  LinkProtection& operator=(const LinkProtection&) = delete;

  /// @param line without a newline.
  virtual void send(Channel& channel, std::string_view line) = 0;
  /// The other end's next line, if it is complete. The channel fails with EBADMSG if the other end
  /// did not send the line through a LinkProtection, and with EMSGSIZE if an incomplete line has
  /// more than `max_size` bytes.
  virtual std::optional<std::string> next_line(Channel& channel, size_t max_size) = 0;
};

}  // namespace syncbn::base
