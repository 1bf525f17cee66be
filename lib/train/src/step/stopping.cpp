#include "step/stopping.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/signal_name.h>
#include <syncbn/dist/process_group.h>

#include <unistd.h>

#include <array>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "step/early_signals.h"

namespace syncbn::train {
namespace {

using SystemClock = std::chrono::system_clock;

const SystemClock::time_point g_loaded = SystemClock::now();

std::atomic<int> g_received{0};
std::atomic<int64_t> g_received_at{0};  // in nanoseconds
std::atomic<bool> g_second_ends{false};
static_assert(std::atomic<int64_t>::is_always_lock_free, "a signal handler writes it");

void remember(int signal) {
  constexpr int64_t kSecond = 1'000'000'000;
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t now = time.tv_sec * kSecond + time.tv_nsec;
  int64_t never = 0;
  // The time first: a second signal, on another thread, must not find a signal without a time.
  if (g_received_at.compare_exchange_strong(never, now)) {
    g_received = signal;
    return;
  }
  // `timeout` and some batch systems send one signal twice, to the process and to its group.
  if (!g_second_ends || now - g_received_at < kSecond) return;
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

/// Whether this process reports how it ends, because no launcher does.
bool g_tells_end = false;

// A signal handler: formatting allocates no memory, since the name is short.
void leave(int signal) {
  std::array<char, 64> text;
  const char* const end =
      fmt::format_to_n(text.data(), text.size(), "train: ended by {}, with nothing to save\n",
                       base::signal_name(signal))
          .out;
  if (g_tells_end)
    std::ignore = ::write(STDERR_FILENO, text.data(), static_cast<size_t>(end - text.data()));
  ::_exit(base::kExitPreempted);
}

}  // namespace

void leave_at_early_signals() {
  g_tells_end = !base::env("TORCHELASTIC_RUN_ID") && base::env("LOCAL_RANK").value_or("0") == "0";
  for (const int signal : kEarlySignals) {
    if (::signal(signal, leave) == SIG_IGN) ::signal(signal, SIG_IGN);
  }
  take_held_signals();
}

void take_held_signals() {
  sigset_t held;
  sigemptyset(&held);
  for (const int signal : kEarlySignals) sigaddset(&held, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &held, nullptr);
}

StopSignals::StopSignals() {
  g_received = 0;
  g_received_at = 0;
  // A launcher ends its workers itself at the second signal.
  g_second_ends = !base::env("LOCAL_RANK");
  struct sigaction action {};
  action.sa_handler = remember;
  sigfillset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  // SIGUSR1 and SIGUSR2: batch systems announce the end of a job's time with one of these. SIGHUP:
  // the terminal is gone.
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2}) {
    Former& former = former_.emplace_back(Former{signal, {}});
    ::sigaction(signal, &action, &former.action);
    if (former.action.sa_handler == SIG_IGN) ::sigaction(signal, &former.action, nullptr);
  }
}

StopSignals::~StopSignals() {
  const bool fails = std::uncaught_exceptions() > 0;
  for (Former& former : former_) {
    // The launcher ends the peers of a failed rank by a signal, which leave() would report as a
    // stop.
    if (fails && former.action.sa_handler == leave) former.action.sa_handler = SIG_DFL;
    ::sigaction(former.signal, &former.action, nullptr);
  }
}

double seconds_of_job() {
  static const SystemClock::time_point started = [] {
    constexpr int64_t kMaxSeconds = int64_t{1} << 33;  // well within the range of a time_point
    const auto launched = base::env_int("SYNCBN_JOB_START", 0, kMaxSeconds);
    return launched ? SystemClock::from_time_t(*launched) : g_loaded;
  }();
  return std::chrono::duration<double>(SystemClock::now() - started).count();
}

int StopSignals::received() {
  return g_received.load();
}

at::Tensor Wishes::row() const {
  return at::tensor({static_cast<double>(stop_signal), wants_save ? 1.0 : 0.0,
                     wants_stop ? 1.0 : 0.0, static_cast<double>(profile_steps)},
                    at::kDouble);
}

Wishes Wishes::of_row(const at::Tensor& row) {
  const auto* const values = row.const_data_ptr<double>();
  return {static_cast<int>(values[0]), values[1] != 0, values[2] != 0,
          static_cast<int64_t>(values[3])};
}

// The columns of a vote: first those on the device, then those from the host.
enum : int64_t { kLoss, kFoundInf, kSamples, kWishes };

namespace {

at::Tensor row_of(const at::Tensor& loss, const at::Tensor& found_inf) {
  return at::stack({loss.detach().to(at::kDouble), found_inf.to(at::kDouble)});
}

at::Tensor row_of(const Wishes& wishes, int64_t samples) {
  return at::cat({at::tensor({static_cast<double>(samples)}, at::kDouble), wishes.row()});
}

/// Gathers the rows of all ranks. Sets `found_inf` to 1 if a loss is not finite. For a few bytes an
/// all-gather is quicker than an all-reduce: one hop instead of many.
/// @param is_bad set to whether a loss is not finite
at::Tensor exchange(const at::Tensor& row, at::Tensor& found_inf, at::Tensor& is_bad) {
  const at::Tensor all = at::stack(dist::all_gather(row));
  is_bad = all.select(1, kLoss).isfinite().all().logical_not();
  found_inf.logical_or_(is_bad);
  return all;
}

}  // namespace

at::Tensor StepVote::cast(const Wishes& wishes, const at::Tensor& loss, int64_t samples,
                          at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  at::Tensor is_bad;
  if (loss.is_cpu()) {
    votes_ =
        exchange(at::cat({row_of(loss, found_inf), row_of(wishes, samples)}), found_inf, is_bad);
  } else {
    const at::Tensor losses = exchange(row_of(loss, found_inf), found_inf, is_bad);
    wishes_ = dist::all_gather_async(row_of(wishes, samples));
    votes_ = at::empty_like(losses, losses.options().device(at::kCPU).pinned_memory(true));
    votes_.copy_(losses, /*non_blocking=*/true);
    const c10::impl::VirtualGuardImpl device(losses.device().type());
    copied_.emplace(losses.device().type());
    copied_->record(device.getStream(losses.device()));
  }
  return is_bad;
}

// Polls, since a wait inside CUDA never ends if another rank is stuck.
void StepVote::wait_for_device() const {
  constexpr std::chrono::microseconds kInterval{20};
  // Grace period for the group's monitor, which has the same timeout, aborts what waits, and knows
  // which rank is missing.
  constexpr std::chrono::seconds kGrace{3};
  const auto deadline = std::chrono::steady_clock::now() + timeout_ + kGrace;
  while (!copied_->query()) {
    if (std::chrono::steady_clock::now() > deadline) {
      dist::throw_if_aborted();
      throw base::UnavailableError(fmt::format(
          "rank {}: the GPU has not ended a step within {} s (timeout); another rank probably "
          "ended or is stuck: its own message, if any, says why",
          dist::rank(), std::chrono::duration<double>(timeout_ + kGrace).count()));
    }
    std::this_thread::sleep_for(kInterval);
  }
  dist::throw_if_aborted();
}

std::optional<StepVote::Result> StepVote::take() {
  if (!votes_.defined()) return std::nullopt;
  // First, because it notices that a rank has died.
  const at::Tensor from_hosts = wishes_ ? at::stack(wishes_->tensors()) : at::Tensor();
  wishes_.reset();
  if (copied_) wait_for_device();
  copied_.reset();
  at::Tensor all = std::exchange(votes_, {});
  if (from_hosts.defined()) all = at::cat({all, from_hosts}, 1);
  Result result{.wishes = Wishes::of_row(all.narrow(1, kWishes, all.size(1) - kWishes).amax(0))};
  for (int64_t rank = all.size(0) - 1; rank >= 0; --rank) {
    const double* const vote = all.const_data_ptr<double>() + rank * all.size(1);
    result.overflowed = result.overflowed || vote[kFoundInf] != 0;
    result.samples += static_cast<int64_t>(vote[kSamples]);
    result.loss_sum += vote[kSamples] * vote[kLoss];
    if (!std::isfinite(vote[kLoss])) result.first_bad_rank = rank;
  }
  return result;
}

}  // namespace syncbn::train
