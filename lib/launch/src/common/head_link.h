#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "common/watch_set.h"

namespace syncbn::launch {

/// The head does not say what a head says. @throws base::UnavailableError always.
[[noreturn]] void throw_broken_protocol();

/// A number that the head's message has to hold. @throws base::UnavailableError where it does not.
int number_in(const nlohmann::json& message, const char* key);

/// A node's end of the connection to the head that started it: what the head says comes in on
/// stdin. Its end, or a head that is silent for too long, ends the node. Not thread-safe.
class HeadLink {
 public:
  /// A connection that is cut without a word ends so.
  static constexpr std::chrono::milliseconds kSilence{60'000};

  /// @param input stays open as long as the head lives.
  /// @param silence that the head may keep.
  explicit HeadLink(base::UniqueFd input, std::chrono::milliseconds silence = kSilence);

  /// Readable when there is something to read, or too long was nothing.
  int fd() const { return watched_.fd(); }

  /// The next signal that the head passes on, if there is one yet. SIGSTOP stops the head, too:
  /// then nothing is heard of it until SIGCONT.
  /// @throws base::UnavailableError when the head is gone.
  std::optional<int> next_signal();

  /// Waits for a message of that type. @throws base::UnavailableError when the head is gone.
  nlohmann::json wait_for(const std::string& type);

 private:
  void read();
  void throw_if_gone() const;
  /// Starts the silence anew; without a limit while the head is stopped.
  void await_next(bool limited);

  const std::chrono::milliseconds silence_;
  base::Channel input_;
  base::UniqueFd timer_;  ///< runs out after the silence
  WatchSet watched_{"cannot watch the connection to the head"};
};

}  // namespace syncbn::launch
