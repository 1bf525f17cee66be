#include "sample_sums.h"

#include <ATen/Functions.h>
#include <syncbn/dist/process_group.h>

namespace syncbn::train {

SampleSums SampleSums::reduced(at::Device device) const {
  at::Tensor sums = at::empty({3}, at::kDouble);
  double* values = sums.mutable_data_ptr<double>();
  values[0] = loss, values[1] = correct, values[2] = samples;
  sums = sums.to(device);
  dist::all_reduce(sums);
  sums = sums.cpu();
  const double* all = sums.const_data_ptr<double>();
  return {all[0], all[1], all[2]};
}

}  // namespace syncbn::train
