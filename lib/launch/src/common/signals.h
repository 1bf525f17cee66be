#pragma once

#include <signal.h>
#include <syncbn/base/unique_fd.h>

#include <optional>
#include <vector>

#include "common/head_link.h"
#include "common/watch_set.h"

namespace syncbn::launch {

/// The signals that the launcher acts on, as a descriptor to poll: they are blocked from
/// construction on. SIGHUP is left alone where it was ignored (nohup), and SIGPIPE and SIGXFSZ are
/// ignored. In a node those that its head passes on come here, too.
class Signals {
 public:
  /// @param ending those that end the run.
  /// @param head of a node; null without one.
  explicit Signals(std::vector<int> ending, HeadLink* head = nullptr);

  int fd() const { return both_ ? both_->fd() : fd_.get(); }
  /// SIGSTOP and SIGCONT come only from a head, and are for the workers.
  /// @throws base::UnavailableError when the head is gone.
  std::optional<int> next();
  bool ends(int signal) const;

  /// While it lives, SIGINT, SIGTERM, SIGHUP and SIGQUIT end this process as they do any other: for
  /// calls that may take long, where nothing would have to be tidied up.
  class DefaultActions {
   public:
    DefaultActions();
    ~DefaultActions();
    DefaultActions(const DefaultActions&) = delete;
    DefaultActions& operator=(const DefaultActions&) = delete;

   private:
    sigset_t before_;
  };

  /// Stops this process as Ctrl-Z does and returns when it is continued.
  static void stop_self();

 private:
  std::vector<int> ending_;
  base::UniqueFd fd_;
  HeadLink* head_;
  std::optional<WatchSet> both_;  ///< with a head: readable when one of the two is
};

}  // namespace syncbn::launch
