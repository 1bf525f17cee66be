#pragma once

#include <pthread.h>
#include <signal.h>

#include <ctime>

namespace syncbn::dist::detail {

/// While it lives, writes of this thread to a closed connection fail with EPIPE and do not raise
/// SIGPIPE (Gloo writes without MSG_NOSIGNAL). Threads that this thread starts meanwhile inherit
/// this for good; other threads keep their handling of SIGPIPE.
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
    ::sigtimedwait(&pipe_, nullptr, &now);  // drops a pending one
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
};

}  // namespace syncbn::dist::detail
