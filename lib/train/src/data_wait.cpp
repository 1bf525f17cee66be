#include "data_wait.h"

#include <ATen/Functions.h>
#include <syncbn/dist/process_group.h>

namespace syncbn::train {

void DataWait::start_epoch() {
  epoch_ = since_last_ = {};
}

void DataWait::add(double seconds) {
  for (Sum* sum : {&epoch_, &since_last_}) {
    sum->seconds += seconds;
    ++sum->steps;
  }
}

DataWait::Means DataWait::of_epoch(double elapsed) const {
  return {.seconds = epoch_.mean(), .share = elapsed > 0 ? epoch_.seconds / elapsed : 0};
}

double DataWait::mean_since_last() {
  const double mean = since_last_.mean();
  since_last_ = {};
  return mean;
}

DataWait::Means longest(const DataWait::Means& own, at::Device device) {
  at::Tensor means = at::empty({2}, at::kDouble);
  double* values = means.mutable_data_ptr<double>();
  values[0] = own.seconds, values[1] = own.share;
  means = means.to(device);
  dist::all_reduce(means, c10d::ReduceOp::MAX);
  means = means.cpu();
  return {means.const_data_ptr<double>()[0], means.const_data_ptr<double>()[1]};
}

}  // namespace syncbn::train
