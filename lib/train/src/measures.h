#pragma once

#include <optional>
#include <string>
#include <vector>

#include <syncbn/train/config.h>
#include <syncbn/train/task.h>

#include "records/epoch_record.h"
#include "tasks/added_metrics.h"

namespace syncbn::train {

/// What an evaluation measures, and which measure chooses the best checkpoint.
class Measures {
 public:
  /// @throws base::UserError when checkpoint.keep_best.metric names none of them, when early_stop
  ///   is set but no metric says which network is the best, or when two have the same name
  Measures(const Config& config, const Task& task, const AddedMetrics& added);

  /// The measure that chooses the best checkpoint, if there is one.
  const std::optional<Metric>& chosen() const { return chosen_; }

  /// "test loss 0.0429 accuracy 98.31 %  ": the loss and the first metric, also of the moving
  /// average. Empty without results.
  std::string line_part(const std::string& split, const Results& results) const;

  /// "test accuracy 98.31 %  ": the measure that chooses the best checkpoint, or the first metric.
  std::string headline(const std::string& split, const Results& results) const;

 private:
  std::vector<Metric> all_;
  std::optional<Metric> chosen_;
};

}  // namespace syncbn::train
