#pragma once

#include <signal.h>

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace syncbn::train {

/// While one lives, the signals that ask a run to stop do not end the process: the training loop
/// polls received(). Signals that the process ignores (nohup) stay ignored.
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

/// One small exchange per step. All ranks learn the loss over all samples, and stop after the same
/// step when a single rank has received a signal or has a loss that is not finite: no rank then
/// waits for one that has left.
class StepVote {
 public:
  struct Result {
    int stop_signal = 0;     ///< the highest that any rank received, or 0
    double loss_sum = 0;     ///< over the samples of all ranks; NaN or infinite if any rank's is
    int64_t samples = 0;     ///< of all ranks
    int64_t worst_rank = 0;  ///< the first whose loss is not finite
    bool is_finite() const;
    double loss() const { return loss_sum / static_cast<double>(samples); }
  };

  explicit StepVote(at::Device device);

  /// Every rank calls it once a step, and waits for its device once.
  /// @param loss the mean over `samples`, a scalar.
  /// @throws base::UnavailableError when a peer fails.
  Result cast(int stop_signal, const at::Tensor& loss, int64_t samples);

 private:
  at::Tensor ballot_;
};

}  // namespace syncbn::train
