#include "sample_sums.h"

#include "all_reduced.h"

namespace syncbn::train {

SampleSums SampleSums::reduced(at::Device device) const {
  const auto all = all_reduced({loss, correct, samples}, c10d::ReduceOp::SUM, device);
  return {all[0], all[1], all[2]};
}

}  // namespace syncbn::train
