#include "stopping.h"

#include <ATen/Functions.h>
#include <syncbn/base/env.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <atomic>
#include <cmath>

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
  // SIGUSR1 and SIGUSR2: batch systems announce the end of a job's time with one of these. SIGHUP:
  // the terminal is gone.
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) {
    Former& former = former_.emplace_back(Former{signal, {}});
    ::sigaction(signal, &action, &former.action);
    if (former.action.sa_handler == SIG_IGN) ::sigaction(signal, &former.action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (const Former& former : former_) ::sigaction(former.signal, &former.action, nullptr);
}

int StopSignals::received() {
  return g_received.load();
}

bool StepVote::Result::is_finite() const {
  return std::isfinite(loss_sum);
}

StepVote::StepVote(at::Device device)
    : ballot_(at::zeros({3}, at::TensorOptions(at::kDouble).device(device))) {}

StepVote::Result StepVote::cast(int stop_signal, const at::Tensor& loss, int64_t samples) {
  ballot_[0].fill_(stop_signal);
  ballot_[1].fill_(samples);
  ballot_[2].copy_(loss.detach());
  // For a few bytes an all-gather is quicker than an all-reduce: one hop instead of many.
  const at::Tensor all = at::stack(dist::all_gather(ballot_)).cpu();
  Result result;
  for (int64_t rank = all.size(0) - 1; rank >= 0; --rank) {
    const double* const vote = all.const_data_ptr<double>() + rank * all.size(1);
    result.stop_signal = std::max(result.stop_signal, static_cast<int>(vote[0]));
    result.samples += static_cast<int64_t>(vote[1]);
    result.loss_sum += vote[1] * vote[2];
    if (!std::isfinite(vote[2])) result.worst_rank = rank;
  }
  return result;
}

}  // namespace syncbn::train
