#include "batch_norm/batch_statistics_recorder.h"

namespace syncbn::dist::detail {

thread_local BatchStatisticsRecorder* BatchStatisticsRecorder::current_ = nullptr;

BatchStatisticsRecorder::BatchStatisticsRecorder() {
  current_ = this;
}

BatchStatisticsRecorder::~BatchStatisticsRecorder() {
  current_ = nullptr;
}

void BatchStatisticsRecorder::add(const at::Tensor& running_mean, const MergedMoments& batch) {
  if (running_mean.defined()) by_layer_[running_mean.unsafeGetTensorImpl()].push_back(batch);
}

const std::vector<MergedMoments>& BatchStatisticsRecorder::batches(
    const at::Tensor& running_mean) const {
  static const std::vector<MergedMoments> none;
  const auto found = by_layer_.find(running_mean.unsafeGetTensorImpl());
  return found != by_layer_.end() ? found->second : none;
}

}  // namespace syncbn::dist::detail
