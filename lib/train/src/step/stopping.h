#pragma once

#include <signal.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <syncbn/dist/work.h>

namespace syncbn::train {

/// Until a StopSignals exists, kEarlySignals end the process with base::kExitPreempted: there is
/// nothing to save yet.
void leave_at_early_signals();

/// Unblocks kEarlySignals, which the program that called execv() blocked.
void take_held_signals();

/// Seconds that the job has been running, in all attempts: since its launcher started or, without
/// one, since this program started.
double seconds_of_job();

/// While one lives, the signals that ask a run to stop (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2)
/// do not end the process: the training loop polls received(). Without a launcher, a second signal
/// more than a second later ends it. Signals that the process ignores (nohup) stay ignored.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that arrived, or 0.
  static int received();

 private:
  struct Former {
    int signal;
    struct sigaction action;
  };
  std::vector<Former> former_;
};

/// What a rank asks of all ranks at the end of a step.
struct Wishes {
  int stop_signal = 0;        ///< the signal that this rank received, or 0
  bool wants_save = false;    ///< a checkpoint is due by rank 0's clock
  bool wants_stop = false;    ///< the run's time is up
  int64_t profile_steps = 0;  ///< number of steps that `train profile` asks for, or 0

  /// [4], float64. The element-wise maximum of several rows holds the wishes of all these ranks.
  at::Tensor row() const;
  static Wishes of_row(const at::Tensor& row);

  bool ends_run() const { return stop_signal != 0 || wants_stop; }
};

/// One small exchange per step. All ranks learn the loss over all samples, and act after the same
/// step if any rank has a wish or a loss that is not finite, so that no rank waits for one that has
/// left. The result is read a step later, so that no step waits for its own work on the device.
/// Wishes are exchanged in host memory; on a GPU, only losses go through its streams.
class StepVote {
 public:
  struct Result {
    Wishes wishes;        ///< of any rank; the highest of several signals
    double loss_sum = 0;  ///< over the samples of all ranks; NaN or infinite if any rank's is
    int64_t samples = 0;  ///< of all ranks
    int64_t first_bad_rank = 0;  ///< the first whose loss is not finite
    bool overflowed = false;     ///< gradients were not finite, so the step changed no parameter
    bool is_finite() const { return std::isfinite(loss_sum); }
    double loss() const { return loss_sum / static_cast<double>(samples); }
  };

  /// @param timeout for a wait for the device
  explicit StepVote(std::chrono::milliseconds timeout = std::chrono::minutes(30))
      : timeout_(timeout) {}

  /// Every rank calls it once a step.
  /// @param loss the mean over `samples`, a scalar
  /// @param found_inf a float32 scalar: 1 if gradients are not finite. Becomes 1 on all ranks if
  ///   any rank's loss is not finite.
  /// @return whether any rank's loss is not finite, on the device
  /// @throws base::UnavailableError when a peer fails.
  at::Tensor cast(const Wishes& wishes, const at::Tensor& loss, int64_t samples,
                  at::Tensor& found_inf);

  /// The result of the last cast(), once; waits until the device has computed it.
  /// @throws base::UnavailableError when a peer fails, or the device takes too long
  std::optional<Result> take();

 private:
  void wait_for_device() const;

  const std::chrono::milliseconds timeout_;
  at::Tensor votes_;                  ///< on the CPU: a row for each rank
  std::optional<c10::Event> copied_;  ///< on a GPU: when it has copied votes_ to the host
  dist::WorkPtr wishes_;              ///< on a GPU: the columns that the hosts exchange
};

}  // namespace syncbn::train
