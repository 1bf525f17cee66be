#include "records/data_wait.h"

#include <ATen/Functions.h>
#include <syncbn/dist/process_group.h>

#include <utility>
#include <vector>

namespace syncbn::train {
namespace {

/// Reduces numbers over all ranks, in float64.
std::vector<double> all_reduced(const std::vector<double>& own, c10d::ReduceOp op) {
  at::Tensor numbers = at::tensor(own, at::kDouble);
  dist::all_reduce(numbers, std::move(op));
  const double* all = numbers.const_data_ptr<double>();
  return {all, all + own.size()};
}

}  // namespace

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
  const auto all = all_reduced({own.seconds, own.share}, c10d::ReduceOp::MAX);
  return {all[0], all[1]};
}

}  // namespace syncbn::train
