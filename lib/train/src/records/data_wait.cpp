#include "records/data_wait.h"

#include <ATen/Functions.h>
#include <syncbn/dist/process_group.h>

#include <utility>

namespace syncbn::train {

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
  return std::exchange(since_last_, {}).mean();
}

DataWait::Means longest(const DataWait::Means& own) {
  at::Tensor numbers = at::tensor({own.seconds, own.share}, at::kDouble);
  dist::all_reduce(numbers, c10d::ReduceOp::MAX);
  const double* const all = numbers.const_data_ptr<double>();
  return {all[0], all[1]};
}

}  // namespace syncbn::train
