#pragma once

#include <syncbn/base/unique_fd.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "common/clock.h"
#include "common/descriptors.h"
#include "common/head_link.h"

namespace syncbn::launch {

/// The signals that the launcher handles, as a descriptor to poll. The constructor blocks them, and
/// ignores SIGPIPE, SIGXFSZ and SIGTTOU. SIGHUP is left alone if it was ignored (nohup). On a node
/// that a head started, next() also returns the signals that the head passes on.
class Signals {
 public:
  /// @param ending the signals that end the run.
  /// @param head null if no head started this launcher.
  explicit Signals(std::vector<int> ending, HeadLink* head = nullptr);

  int fd() const { return both_ ? both_->fd() : fd_.get(); }
  /// SIGSTOP and SIGCONT come only from a head; they are meant for the workers. Leaves out an
  /// ending signal after another that no user sends to end the run at once.
  /// @throws base::UnavailableError when the head is gone.
  std::optional<int> next();
  bool ends(int signal) const;

  /// Stops this process as Ctrl-Z does. Returns when it is continued.
  static void stop_self();

 private:
  struct Received {
    int signal = 0;
    uint32_t sender = 0;  ///< a process, or 0: the kernel
    Clock::time_point time = {};
  };

  /// Whether an ending signal after `former` is part of the same request.
  static bool is_echo(const Received& former, const Received& now);

  std::vector<int> ending_;
  base::UniqueFd fd_;
  HeadLink* head_;
  std::optional<WatchSet> both_;  ///< fd_ and the head's, if there is one
  std::optional<Received> last_ending_;
};

}  // namespace syncbn::launch
