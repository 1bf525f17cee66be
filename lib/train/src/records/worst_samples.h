#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/data/dataset.h>
#include <syncbn/train/task.h>

namespace syncbn::train {

/// `count` samples of a batch from `first` on; does not keep the memory of the others.
Task::Seen some_of(const data::Batch& batch, const Task::Outputs& outputs, int64_t first,
                   int64_t count);

/// The samples of an evaluation with the highest losses, for Task::pictures(): as many as
/// Task::pictured_samples(). Not thread-safe.
class WorstSamples {
 public:
  explicit WorstSamples(const Task& task) : task_(task), count_(task.pictured_samples()) {}

  /// Waits for the device unless no pictures are wanted.
  /// @param loss_sum Task::loss_sum() of the batch
  void add(const data::Batch& batch, const Task::Outputs& outputs, const at::Tensor& loss_sum);

  /// The samples, highest loss first.
  std::vector<Task::Seen> take();

 private:
  const Task& task_;
  const int64_t count_;
  std::multimap<double, Task::Seen, std::greater<>> worst_;
};

}  // namespace syncbn::train
