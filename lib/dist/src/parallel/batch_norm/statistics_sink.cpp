#include "batch_norm/statistics_sink.h"

namespace syncbn::dist::detail {

thread_local StatisticsSink* StatisticsSink::current_ = nullptr;

StatisticsSink::StatisticsSink() {
  current_ = this;
}

StatisticsSink::~StatisticsSink() {
  current_ = nullptr;
}

void StatisticsSink::add(const at::Tensor& running_mean, const MergedMoments& batch) {
  if (running_mean.defined()) by_layer_[running_mean.unsafeGetTensorImpl()].push_back(batch);
}

const std::vector<MergedMoments>& StatisticsSink::batches(const at::Tensor& running_mean) const {
  static const std::vector<MergedMoments> none;
  const auto found = by_layer_.find(running_mean.unsafeGetTensorImpl());
  return found != by_layer_.end() ? found->second : none;
}

}  // namespace syncbn::dist::detail
