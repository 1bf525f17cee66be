#pragma once

#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "common/send_buffer.h"

namespace syncbn::launch {

/// A connection between two launchers. It carries messages both ways: JSON objects with a "type", a
/// line each. The one that connects begins with kGreeting, whose first byte tells it from a
/// client of the store at the same port. Never waits. Not thread-safe.
class AgentLink {
 public:
  /// The number is the protocol's version.
  static constexpr const char* kGreeting = "syncbn-agent 1\n";
  /// Between two lines that say what is being waited for.
  static constexpr std::chrono::seconds kNoticePeriod{10};

  /// @param socket non-blocking, and connected.
  /// @param first_bytes what has been read from it already.
  explicit AgentLink(base::UniqueFd socket, std::string first_bytes = "");

  /// Text as it is: the greeting. Like send() it reads nothing: a message that came with it would
  /// wait for the next event.
  void send_text(const std::string& text);
  void send(const nlohmann::json& message);

  /// Reads and writes what is possible now.
  void handle();
  /// The next message; empty when there is none, yet or ever again.
  std::optional<nlohmann::json> next();
  /// The next line as it is: the greeting.
  std::optional<std::string> next_line();

  int fd() const { return socket_.get(); }
  /// Whether handle() waits for the peer to read.
  bool wants_to_write() const { return !outgoing_.empty(); }
  /// The peer has gone, or does not keep to the protocol. Messages that came before are still
  /// there.
  bool closed() const { return closed_; }

 private:
  void write();
  void read();

  base::UniqueFd socket_;
  std::string incoming_;
  SendBuffer outgoing_;
  bool broken_ = false;  ///< nothing can be written any more
  bool closed_ = false;
};

}  // namespace syncbn::launch
