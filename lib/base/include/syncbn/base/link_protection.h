#pragma once

#include <syncbn/base/channel.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// How a link between two processes protects its lines, once the handshake is done. Not
/// thread-safe.
class LinkProtection {
 public:
  LinkProtection() = default;
  virtual ~LinkProtection() = default;
  LinkProtection(const LinkProtection&) = delete;
  LinkProtection& operator=(const LinkProtection&) = delete;

  /// @param line without a newline.
  virtual void send(Channel& channel, std::string_view line) = 0;
  /// The other end's next line, if it is complete. What the other end has not sent in this way ends
  /// the channel with EBADMSG, and a line above `max_size` bytes with EMSGSIZE.
  virtual std::optional<std::string> next_line(Channel& channel, size_t max_size) = 0;
};

}  // namespace syncbn::base
