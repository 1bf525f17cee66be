#pragma once

#include <signal.h>
#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/descriptors.h"
#include "common/head_link.h"

namespace syncbn::launch {

/// The signals that the launcher handles, as a descriptor to poll. The constructor blocks them, and
/// ignores SIGPIPE and SIGXFSZ. SIGHUP is left alone if it was ignored (nohup). On a node that a
/// head started, next() also returns the signals that the head passes on.
class Signals {
 public:
  /// @param ending the signals that end the run.
  /// @param head null if no head started this launcher.
  explicit Signals(std::vector<int> ending, HeadLink* head = nullptr);

  int fd() const { return both_ ? both_->fd() : fd_.get(); }
  /// SIGSTOP and SIGCONT come only from a head; they are meant for the workers. An ending signal
  /// that the same process repeats within a second is left out.
  /// @throws base::UnavailableError when the head is gone.
  std::optional<int> next();
  bool ends(int signal) const;
  /// Whether the user asks to end at once, if another signal has asked to end already. A terminal
  /// that is closed sends SIGHUP twice: its shell does, and the kernel at the shell's end.
  static bool insists(int signal) { return signal != SIGHUP; }

  /// Stops this process as Ctrl-Z does. Returns when it is continued.
  static void stop_self();

 private:
  struct Received {
    int signal = 0;
    uint32_t sender = 0;  ///< a process, or 0: the kernel
    std::chrono::steady_clock::time_point time = {};
  };

  std::vector<int> ending_;
  base::UniqueFd fd_;
  HeadLink* head_;
  std::optional<WatchSet> both_;  ///< fd_ and the head's, if there is one
  Received last_;
};

}  // namespace syncbn::launch
