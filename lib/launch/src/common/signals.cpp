#include "common/signals.h"

#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/signal_mask.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace syncbn::launch {

Signals::Signals(std::vector<int> ending, HeadLink* head)
    : ending_(std::move(ending)), head_(head) {
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // with `ulimit -f`, writes then fail with EFBIG
  ::signal(SIGTTOU, SIG_IGN);  // in the background, `stty tostop` would stop it at a write
  // If our parent ignored SIGCHLD, waitpid() would get no status of our children.
  ::signal(SIGCHLD, SIG_DFL);
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGUSR1, SIGUSR2, SIGTSTP, SIGWINCH}) ::sigaddset(&set, signal);
  for (const int signal : ending_) {
    struct sigaction now {};
    ::sigaction(signal, nullptr, &now);
    if (signal != SIGHUP || now.sa_handler != SIG_IGN) ::sigaddset(&set, signal);
  }
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  fd_.reset(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) base::throw_errno("signalfd");
  if (head_ == nullptr) return;
  both_.emplace("cannot wait for signals");
  for (const int fd : {fd_.get(), head_->fd()}) both_->add(fd);
}

std::optional<int> Signals::next() {
  signalfd_siginfo info;
  while (::read(fd_.get(), &info, sizeof(info)) == sizeof(info)) {
    const Received now{static_cast<int>(info.ssi_signo), info.ssi_pid, Clock::now()};
    if (!ends(now.signal)) return now.signal;
    const auto former = std::exchange(last_ending_, now);
    if (!former || !is_echo(*former, now)) return now.signal;
  }
  const auto signal = head_ != nullptr ? head_->next_signal() : std::nullopt;
  // The end of the ssh connection may bring a SIGHUP after it.
  if (signal && ends(*signal)) last_ending_ = Received{.signal = *signal};
  return signal;
}

bool Signals::is_echo(const Received& former, const Received& now) {
  // A terminal that is closed: the shell sends SIGHUP, and the kernel at the shell's end.
  if (now.signal == SIGHUP) return true;
  // `timeout` sends its signal to this process and to the process group. The kernel's have no
  // sender: Ctrl-C twice is meant.
  return now.signal == former.signal && now.sender != 0 && now.sender == former.sender &&
         now.time - former.time < std::chrono::seconds(1);
}

bool Signals::ends(int signal) const {
  return std::find(ending_.begin(), ending_.end(), signal) != ending_.end();
}

void Signals::stop_self() {
  // Unlike SIGSTOP, the default action of SIGTSTP does nothing in an orphaned process group, where
  // no shell could continue us.
  ::signal(SIGTSTP, SIG_DFL);
  ::raise(SIGTSTP);
  const base::SignalMask stopped_here(SIG_UNBLOCK, {SIGTSTP});
}

}  // namespace syncbn::launch
