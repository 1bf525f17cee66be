#include "stop_signals.h"

#include <syncbn/base/env.h>

#include <atomic>

namespace syncbn::train {
namespace {

std::atomic<int> g_received{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler writes it");

void remember(int signal) {
  g_received.store(signal);
}

}  // namespace

StopSignals::StopSignals() {
  g_received.store(0);
  struct sigaction action {};
  action.sa_handler = remember;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  // Started by hand, a second Ctrl-C ends it at once. Under a launcher the same Ctrl-C may arrive
  // twice, from the terminal and from the launcher, which has its own way to end what hangs.
  if (!base::env("LOCAL_RANK")) action.sa_flags |= static_cast<int>(SA_RESETHAND);
  ::sigaction(SIGTERM, &action, &former_term_);
  ::sigaction(SIGINT, &action, &former_int_);
}

StopSignals::~StopSignals() {
  ::sigaction(SIGTERM, &former_term_, nullptr);
  ::sigaction(SIGINT, &former_int_, nullptr);
}

int StopSignals::received() {
  return g_received.load();
}

}  // namespace syncbn::train
