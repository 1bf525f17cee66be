#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>
#include <syncbn/data/dataset.h>
#include <syncbn/train/task.h>

namespace syncbn::train {

/// A metric of evaluations that a configuration adds to its task's, made from counts over the
/// samples. Not thread-safe.
class CountedMetric {
 public:
  virtual ~CountedMetric() = default;

  /// K, the length of counts().
  virtual int64_t num_counts() const = 0;

  /// Counts over the samples of a batch: [K], int64, on the device of `target`. Integers add up to
  /// the same numbers for any number of ranks.
  /// @param outputs, target as Task::loss_sum() has them
  virtual at::Tensor counts(const Task::Outputs& outputs, const at::Tensor& target) const = 0;

  /// Always the same name.
  /// @param counts summed over the samples of all ranks; all 0 if there are none
  virtual Metric metric(std::span<const int64_t> counts) const = 0;
};

/// The registry behind `metrics: [{type: top_k, k: 3}]`. Knows top_k, calibration_error.
/// make() throws base::UserError if the data set does not suit the metric. The data set outlives
/// the metric.
struct MetricKind {
  using Registry = config::Registry<std::unique_ptr<CountedMetric>, const data::Dataset&>;
  static Registry& registry();
};

}  // namespace syncbn::train
