#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>
#include <syncbn/data/dataset.h>
#include <syncbn/train/task.h>

namespace syncbn::train {

/// A metric that a configuration adds to its task's. Evaluations compute it from counts over the
/// samples. Not thread-safe.
class CountedMetric {
 public:
  virtual ~CountedMetric() = default;

  /// K, the length of counts().
  virtual int64_t num_counts() const = 0;

  /// Counts over the samples of a batch: [K], int64, on the device of `target`. Integers, so that
  /// the sums are the same for any number of ranks.
  /// @param outputs, target as in Task::loss_sum()
  virtual at::Tensor counts(const Task::Outputs& outputs, const at::Tensor& target) const = 0;

  /// Its name must always be the same.
  /// @param counts summed over the samples of all ranks; all 0 if there are none
  virtual Metric metric(std::span<const int64_t> counts) const = 0;
};

/// The registry behind `metrics: [{type: top_k, k: 3}]`. Contains top_k and calibration_error.
/// make() throws base::UserError if the data set does not suit the metric. The data set outlives
/// the metric.
struct MetricKind {
  using Registry = config::Registry<std::unique_ptr<CountedMetric>, const data::Dataset&>;
  static Registry& registry();
};

}  // namespace syncbn::train
