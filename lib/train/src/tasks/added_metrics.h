#pragma once

#include <memory>
#include <span>
#include <vector>

#include <syncbn/train/config.h>
#include <syncbn/train/metric.h>

namespace syncbn::train {

/// The metrics of the key `metrics`, with their counts one after the other.
class AddedMetrics {
 public:
  /// @throws base::UserError for a metric that is not for this data.
  AddedMetrics(const Config& config, const data::Dataset& dataset);

  int64_t num_counts() const;
  at::Tensor counts(const Task::Outputs& outputs, const at::Tensor& target) const;
  std::vector<Metric> metrics(std::span<const int64_t> counts) const;

 private:
  std::vector<std::unique_ptr<CountedMetric>> all_;
};

}  // namespace syncbn::train
