#pragma once

#include <string>
#include <vector>

#include <syncbn/train/config.h>
#include <syncbn/train/task.h>

#include "run_folder.h"

namespace syncbn::train {

/// What an evaluation measures, and which measure chooses the best checkpoint.
class Measures {
 public:
  /// @throws base::UserError when checkpoint.keep_best.metric names none of them.
  Measures(const Config& config, const Task& task);

  /// The measure by which the best checkpoint is chosen.
  const Metric& chosen() const { return chosen_; }

  /// "test loss 0.0429 accuracy 98.31 %  ": the loss and the first metric, also of the moving
  /// average. Empty without results.
  std::string line_part(const std::string& split, const Results& results) const;

 private:
  std::vector<Metric> all_;
  Metric chosen_;
};

}  // namespace syncbn::train
