#pragma once

#include <pthread.h>
#include <signal.h>

#include <ctime>

namespace syncbn::dist::detail {

/// While it lives, writing to a connection whose other end is gone is an error in this thread and
/// not the end of the process: Gloo writes without MSG_NOSIGNAL. Threads started meanwhile keep it
/// so. Elsewhere the program's own treatment of SIGPIPE holds.
class NoSigpipe {
 public:
  NoSigpipe() {
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    if (::sigismember(&before_, SIGPIPE) == 1) return;
    const timespec now{};
    ::sigtimedwait(&pipe_, nullptr, &now);  // one that is pending would come with the old mask
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
};

}  // namespace syncbn::dist::detail
