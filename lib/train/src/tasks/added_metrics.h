#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <syncbn/train/config.h>
#include <syncbn/train/metric.h>

namespace syncbn::train {

/// The metrics of the key `metrics`, with their counts concatenated.
class AddedMetrics {
 public:
  /// @throws base::UserError for a metric that does not suit this data
  AddedMetrics(const Config& config, const data::Dataset& dataset);

  int64_t num_counts() const;
  at::Tensor counts(const Task::Outputs& outputs, const at::Tensor& target) const;
  std::vector<Metric> metrics(std::span<const int64_t> counts) const;

 private:
  struct Added {
    std::string name;  ///< component_name()
    int64_t num_counts;
    std::unique_ptr<CountedMetric> metric;
  };

  std::vector<Added> all_;
};

}  // namespace syncbn::train
