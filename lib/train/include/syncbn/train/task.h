#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/config/component.h>
#include <syncbn/data/dataset.h>
#include <syncbn/data/random.h>

namespace syncbn::train {

/// A measure of how well a network does.
struct Metric {
  std::string name;  ///< "accuracy"
  double value = 0;
  bool higher_is_better = true;
  bool is_share = false;  ///< in [0, 1], shown in percent
};

/// A value of the metric, for people: "98.31 %" or "0.0429".
std::string shown(const Metric& metric, double value);

/// What a network is trained for: its loss, the counts of right and wrong answers, and the metrics
/// made from them. The training loop knows nothing else about outputs and targets.
///
/// Tensors are on the training device; none of these calls may wait for it. Not thread-safe.
class Task {
 public:
  virtual ~Task() = default;

  /// Changes a training batch ahead of the forward pass, as MixUp does. All randomness must come
  /// from `random`, so that a resumed run repeats it.
  virtual data::Batch augment(const data::Batch& batch, data::SampleRandom& random) const;

  /// The loss to train on: the mean over the samples, a scalar with a graph.
  virtual at::Tensor loss(const at::Tensor& output, const at::Tensor& target) const = 0;

  /// The loss to report in evaluation: the sum over the samples, without regularisation such as
  /// label smoothing.
  virtual at::Tensor loss_sum(const at::Tensor& output, const at::Tensor& target) const = 0;

  /// Counts over the samples: [K], int64, the same K in every call. Integers add up to the same
  /// numbers for any number of ranks.
  virtual at::Tensor counts(const at::Tensor& output, const at::Tensor& target) const = 0;

  /// K, the length of counts().
  virtual int64_t num_counts() const = 0;

  /// The metrics of `counts`, summed over any samples; for zeros, values are 0. The first one
  /// chooses the best checkpoint unless the configuration names another.
  virtual std::vector<Metric> metrics(std::span<const int64_t> counts) const = 0;
};

/// The registry behind `task: {type: classification}`. A custom task is a class and a line of
/// registration, as for data::DatasetKind.
/// make() throws base::UserError if the data set does not suit the task.
struct TaskKind {
  using Registry = config::Registry<std::unique_ptr<Task>, const data::Dataset&>;
  static Registry& registry();
};

}  // namespace syncbn::train
