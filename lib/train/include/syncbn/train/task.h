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
#include <syncbn/models/model.h>

namespace syncbn::train {

/// A measure of how well a network does.
struct Metric {
  std::string name;  ///< "accuracy"
  double value = 0;  ///< NaN: none
  bool higher_is_better = true;
  bool is_share = false;  ///< in [0, 1], shown in percent
};

/// A value of the metric, for people: "98.31 %" or "0.0429".
std::string shown(const Metric& metric, double value);

/// What a network is trained for: its loss, the counts of right and wrong answers, and the metrics
/// made from them. The training loop knows nothing else about outputs and targets.
///
/// `outputs` are those of models::Model::forward_all(): the network's logits and, in training,
/// those of its auxiliary heads. Tensors are on the training device; calls in training may not wait
/// for it. Not thread-safe.
class Task {
 public:
  using Outputs = std::vector<at::Tensor>;

  virtual ~Task() = default;

  /// Called once, ahead of all calls below: the network that makes the outputs. It outlives the
  /// task.
  /// @throws base::UserError if it does not suit the task; its message calls the network "it".
  virtual void attach(const models::Model& model);

  /// Changes a training batch ahead of the forward pass, as MixUp does. All randomness must come
  /// from `random`, so that a resumed run repeats it.
  virtual data::Batch augment(const data::Batch& batch, data::SampleRandom& random) const;

  /// The loss to train on: the mean over the rank's samples (or pixels), a scalar with a graph.
  virtual at::Tensor loss(const Outputs& outputs, const at::Tensor& target) const = 0;

  /// The loss to report in evaluation, without regularisation such as label smoothing: {sum, number
  /// of summands}, [2], of any float type.
  virtual at::Tensor loss_sum(const Outputs& outputs, const at::Tensor& target) const = 0;

  /// Counts over the samples: [K], int64, the same K in every call. Integers add up to the same
  /// numbers for any number of ranks.
  virtual at::Tensor counts(const Outputs& outputs, const at::Tensor& target) const = 0;

  /// K, the length of counts().
  virtual int64_t num_counts() const = 0;

  /// Whether metrics need records() of the samples, because sums do not tell enough. Then training
  /// reports the loss alone, and counts() and records() are for evaluation, with one sample at a
  /// time.
  virtual bool needs_records() const { return false; }

  /// What metrics() must know about the samples beyond their counts, in any number of values.
  virtual std::vector<int64_t> records(const Outputs& outputs, const at::Tensor& target) const;

  /// The metrics of any samples: always the same ones, with 0 or NaN for what the samples do not
  /// tell. The first one chooses the best checkpoint unless the configuration names another.
  /// @param counts summed over the samples
  /// @param records of all samples, in an order that depends on the number of ranks; the metrics
  ///   must not
  virtual std::vector<Metric> metrics(std::span<const int64_t> counts,
                                      std::span<const int64_t> records) const = 0;

  /// What a reader of the metrics of `counts` should know: "miou leaves out ...". Empty: nothing.
  virtual std::string remark(std::span<const int64_t> counts) const;
};

/// The registry behind `task: {type: classification}`. A custom task is a class and a line of
/// registration, as for data::DatasetKind.
/// make() throws base::UserError if the data set does not suit the task. The data set outlives the
/// task.
struct TaskKind {
  using Registry = config::Registry<std::unique_ptr<Task>, const data::Dataset&>;
  static Registry& registry();
};

}  // namespace syncbn::train
