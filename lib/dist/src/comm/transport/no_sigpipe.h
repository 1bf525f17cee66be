#pragma once

#include <pthread.h>
#include <signal.h>

#include <ctime>

namespace syncbn::dist::detail {

/// While it lives, this thread gets EPIPE, not SIGPIPE, when it writes to a closed connection: Gloo
/// writes without MSG_NOSIGNAL. Threads started meanwhile inherit this. The program's own handling
/// of SIGPIPE holds everywhere else.
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
