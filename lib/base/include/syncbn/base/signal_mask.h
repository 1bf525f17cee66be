#pragma once

#include <pthread.h>
#include <signal.h>

#include <initializer_list>

namespace syncbn::base {

/// Changes which signals are blocked in the calling thread, for the lifetime of the object. Threads
/// and processes that start meanwhile inherit the change.
class SignalMask {
 public:
  /// Blocks all signals. Use it while a library starts threads: only the program's own threads
  /// handle signals.
  SignalMask() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  /// @param how SIG_BLOCK, SIG_UNBLOCK or SIG_SETMASK.
  SignalMask(int how, std::initializer_list<int> signals) {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int signal : signals) ::sigaddset(&set, signal);
    ::pthread_sigmask(how, &set, &before_);
  }
  ~SignalMask() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalMask(const SignalMask&) = delete;
  SignalMask& operator=(const SignalMask&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace syncbn::base
