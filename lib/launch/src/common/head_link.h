#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "common/descriptors.h"

namespace syncbn::launch {

/// Reports that the head broke the protocol. @throws base::UnavailableError always.
[[noreturn]] void throw_broken_protocol();

/// The number at `key` of a head's message. @throws base::UnavailableError if there is none.
int number_in(const nlohmann::json& message, const char* key);

/// A node's end of the connection to the head that started it. The head writes to the node's stdin;
/// the end of that stream, or a head that is silent for too long, ends the node. Not thread-safe.
class HeadLink {
 public:
  /// Upper bound on the time between two messages, so that a lost connection is noticed.
  static constexpr std::chrono::milliseconds kSilence{60'000};

  /// @param input closes when the head ends.
  explicit HeadLink(base::UniqueFd input, std::chrono::milliseconds silence = kSilence);

  /// Readable when there is something to read or the head has been silent for too long.
  int fd() const { return watched_.fd(); }

  /// The next signal that the head has passed on, if any. After SIGSTOP the head is stopped as
  /// well, and may be silent until SIGCONT.
  /// @throws base::UnavailableError when the head is gone.
  std::optional<int> next_signal();

  /// Waits for a message of that type and drops all others. @throws base::UnavailableError when the
  /// head is gone.
  nlohmann::json wait_for(const std::string& type);

 private:
  void read();
  void throw_if_gone() const;
  /// Restarts the timer; stops it if not `limited`.
  void await_next(bool limited);

  const std::chrono::milliseconds silence_;
  base::Channel input_;
  base::UniqueFd timer_;  ///< expires when the head has been silent for too long
  WatchSet watched_{"cannot watch the connection to the head"};
};

}  // namespace syncbn::launch
