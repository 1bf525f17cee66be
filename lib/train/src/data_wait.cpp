#include "data_wait.h"

#include "all_reduced.h"

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
  const auto all = all_reduced({own.seconds, own.share}, c10d::ReduceOp::MAX, device);
  return {all[0], all[1]};
}

}  // namespace syncbn::train
