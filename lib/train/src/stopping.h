#pragma once

#include <signal.h>

#include <ATen/core/Tensor.h>

namespace syncbn::train {

/// While one lives, SIGTERM and SIGINT do not end the process: the training loop polls received().
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that arrived, or 0.
  static int received();

 private:
  struct sigaction former_term_ {};
  struct sigaction former_int_ {};
};

/// One small exchange per step, by which all ranks stop after the same step when a single rank has
/// received a signal or has a loss that is not finite. No rank then waits for one that has left.
class StepVote {
 public:
  struct Result {
    int stop_signal = 0;      ///< the highest that any rank received, or 0
    bool not_finite = false;  ///< some rank's loss is NaN or infinite
  };

  explicit StepVote(at::Device device);

  /// Every rank calls it once a step. @throws base::UnavailableError when a peer fails.
  Result cast(int stop_signal, const at::Tensor& loss);

 private:
  at::Tensor ballot_;
};

}  // namespace syncbn::train
