#include "step_vote.h"

#include <ATen/Functions.h>
#include <syncbn/dist/process_group.h>

namespace syncbn::train {

StepVote::StepVote(at::Device device)
    : ballot_(at::zeros({2}, at::TensorOptions(at::kInt).device(device))) {}

StepVote::Result StepVote::cast(int stop_signal, const at::Tensor& loss) {
  ballot_[0].fill_(stop_signal);
  ballot_[1].copy_(at::isfinite(loss.detach()).logical_not());
  dist::all_reduce(ballot_, c10d::ReduceOp::MAX);
  const at::Tensor result = ballot_.cpu();
  const int* votes = result.const_data_ptr<int>();
  return {votes[0], votes[1] != 0};
}

}  // namespace syncbn::train
