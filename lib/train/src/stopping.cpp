#include "stopping.h"

#include <ATen/Functions.h>
#include <syncbn/base/env.h>
#include <syncbn/dist/process_group.h>

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
  // Without a launcher, a second Ctrl-C ends the process at once. Under a launcher one Ctrl-C may
  // arrive twice, from the terminal and from the launcher, which kills workers that do not stop.
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

StepVote::StepVote(at::Device device)
    : ballot_(at::zeros({2}, at::TensorOptions(at::kInt).device(device))) {}

StepVote::Result StepVote::cast(int stop_signal, const at::Tensor& loss) {
  ballot_[0].fill_(stop_signal);
  ballot_[1].copy_(at::isfinite(loss.detach()).logical_not());
  // For a few bytes an all-gather is quicker than an all-reduce: one hop instead of many.
  const at::Tensor result = at::stack(dist::all_gather(ballot_)).amax(0).cpu();
  const int* votes = result.const_data_ptr<int>();
  return {votes[0], votes[1] != 0};
}

}  // namespace syncbn::train
