#pragma once

// at::Tensor: the ballot.
#include <ATen/core/Tensor.h>

namespace syncbn::train {

/// The one thing that all ranks agree on in every step, in one small exchange: whether to go on.
/// Whatever a single rank notices (a signal, a loss that is not finite) becomes every rank's
/// decision at the same step, so that none waits for another that has left.
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
