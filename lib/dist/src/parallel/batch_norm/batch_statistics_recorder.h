#pragma once

#include <unordered_map>
#include <vector>

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail {

/// While it lives, this thread's layers leave the statistics of their batches here, and their
/// running statistics as they are. One at a time.
class BatchStatisticsRecorder {
 public:
  BatchStatisticsRecorder();
  ~BatchStatisticsRecorder();
  BatchStatisticsRecorder(const BatchStatisticsRecorder&) = delete;
  BatchStatisticsRecorder& operator=(const BatchStatisticsRecorder&) = delete;

  /// That of this thread, or null.
  static BatchStatisticsRecorder* current() { return current_; }

  void add(const at::Tensor& running_mean, const MergedMoments& batch);
  /// Of the layer with this running mean, in the order in which it ran.
  const std::vector<MergedMoments>& batches(const at::Tensor& running_mean) const;

 private:
  static thread_local BatchStatisticsRecorder* current_;
  std::unordered_map<const at::TensorImpl*, std::vector<MergedMoments>> by_layer_;
};

}  // namespace syncbn::dist::detail
