#include "step_vote.h"

#include <ATen/Functions.h>
#include <syncbn/dist/process_group.h>

namespace syncbn::train {

StepVote::StepVote(at::Device device)
    : ballot_(at::zeros({2}, at::TensorOptions(at::kInt).device(device))) {}

StepVote::Result StepVote::cast(int stop_signal, const at::Tensor& loss) {
  ballot_[0].fill_(stop_signal);
  ballot_[1].copy_(at::isfinite(loss.detach()).logical_not());
  // Gathered, not reduced: for a few bytes that is one hop between ranks instead of many.
  const at::Tensor result = at::stack(dist::all_gather(ballot_)).amax(0).cpu();
  const int* votes = result.const_data_ptr<int>();
  return {votes[0], votes[1] != 0};
}

}  // namespace syncbn::train
