#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/config/component.h>
#include <syncbn/data/dataset.h>
#include <syncbn/data/image.h>
#include <syncbn/data/random.h>
#include <syncbn/data/transforms.h>

namespace syncbn::models {
class Model;
}

namespace syncbn::train {

/// A measure of how well a network does.
struct Metric {
  std::string name;  ///< "accuracy"
  double value = 0;  ///< NaN: none
  bool higher_is_better = true;
  bool is_share = false;  ///< in [0, 1], shown in percent
};

/// A value of the metric as text: "98.31 %", "0.0429" or "2.860e+22".
std::string shown(const Metric& metric, double value);

/// A picture of what a network does.
struct Picture {
  std::string name;  ///< "samples"
  data::Image image;
};

/// A file about the results of an evaluation.
struct Table {
  std::string name;  ///< "confusion.csv"
  std::string text;
};

/// How the rows of a task's predictions become a file: the rows of all images, with `separator`
/// between each two.
struct PredictionFile {
  std::string name;  ///< "predictions.csv"; empty: there are no rows
  std::string opening;
  std::string separator;
  std::string closing;
};

/// A network's answer about an image.
struct Prediction {
  std::vector<std::string> rows = {};
  std::optional<data::Image> mask = {};  ///< the label of each pixel
};

/// An image of `train predict`.
struct UnlabelledImage {
  std::string file;
  int64_t index = 0;  ///< in the sorted list of all images
  /// The part of the network's input that shows the image, in the upper left corner.
  data::ImageSize input = {};
  /// The image size to which boxes and masks in the answer refer.
  data::ImageSize size = {};
};

/// What a network is trained for: its loss, the counts of right and wrong answers, and the metrics
/// made from them. The training loop knows nothing else about outputs and targets.
///
/// `outputs` are those of forward(): the network's logits and, in training, those of its auxiliary
/// heads. Tensors are on the training device; calls in training must not wait for it. Not
/// thread-safe.
class Task {
 public:
  using Outputs = std::vector<at::Tensor>;

  /// A batch as the network's input, and the network's outputs for it.
  struct Seen {
    data::Batch batch;
    Outputs outputs;
  };

  virtual ~Task() = default;

  /// Passes the network that the task is about; called once, before all calls below. The network
  /// outlives the task.
  /// @throws base::UserError if the network does not suit the task; the message calls it "it"
  virtual void attach(models::Model& /*model*/) {}

  /// Changes a training batch before the forward pass, as MixUp does. All randomness must come from
  /// `random`, so that a resumed run repeats it.
  virtual data::Batch augment(const data::Batch& batch, data::SampleRandom& /*random*/) const {
    return batch;
  }

  /// The parts of the network that a step trains one after the other, each with its own forward and
  /// backward pass, gradient exchange and update. A part is named by a prefix of its parameters'
  /// names. By default one turn trains the whole network.
  virtual std::vector<std::string> turns() const { return {""}; }

  /// The network's outputs for the loss in a turn; evaluation uses the first turn's. By default
  /// models::Model::forward_all().
  /// @param batch from augment(), or from the evaluation set, as input for the network
  virtual Outputs forward(models::Model& model, size_t turn, const data::Batch& batch) const;

  /// The loss to train on: the mean over the rank's samples or pixels, a scalar with a graph.
  virtual at::Tensor loss(const Outputs& outputs, const at::Tensor& target) const = 0;

  /// The loss for evaluation, without regularisation such as label smoothing: {sum, number of
  /// summands}, [2], of any float type.
  virtual at::Tensor loss_sum(const Outputs& outputs, const at::Tensor& target) const = 0;

  /// Counts over the samples: [K], int64, the same K in every call. Integers, so that the sums are
  /// the same for any number of ranks.
  virtual at::Tensor counts(const Outputs& outputs, const at::Tensor& target) const = 0;

  /// K, the length of counts().
  virtual int64_t num_counts() const = 0;

  /// Whether training calls counts() for each batch and reports training_metrics(). If not,
  /// training reports only the loss, and counts() may wait for the device.
  virtual bool counts_training() const { return true; }

  /// Whether a training batch's targets are classes or shares of classes: the pictures of the first
  /// batch then show the classes' names.
  virtual bool targets_are_classes() const { return false; }

  /// Whether evaluation takes one sample at a time, whatever the batch size: necessary if the
  /// result of a sample depends on the other samples in its batch.
  virtual bool evaluates_one_by_one() const { return false; }

  /// What an evaluation needs to know about the samples beyond the sums of counts(): int64, [any
  /// number]. Training does not call it, so it may cost more than counts() and may wait for the
  /// device. By default empty.
  virtual at::Tensor records(const Outputs& outputs, const at::Tensor& target) const;

  /// The basis for an evaluation's worst mistakes: for each sample its loss, its class and the
  /// network's answer, [B, 3], float64. Undefined, as by default, if samples have no class.
  virtual at::Tensor verdicts(const Outputs& /*outputs*/, const at::Tensor& /*target*/) const {
    return {};
  }

  // For an evaluation: `counts` are summed over the samples; `records` are those of all samples, in
  // an order that depends on the number of ranks, so results must not depend on the order.

  /// Always the same metrics, with 0 or NaN for what the samples do not determine. The first one
  /// chooses the best checkpoint if has_best(), unless the configuration names another.
  virtual std::vector<Metric> metrics(std::span<const int64_t> counts,
                                      std::span<const int64_t> records) const = 0;

  /// Whether a metric says which network is the best.
  virtual bool has_best() const { return true; }

  /// A note for readers of the metrics: "miou leaves out ...". Empty: none.
  virtual std::string remark(std::span<const int64_t> /*counts*/,
                             std::span<const int64_t> /*records*/) const {
    return {};
  }

  /// Always tables of the same names. The run's folder holds those of the last evaluation.
  virtual std::vector<Table> tables(std::span<const int64_t> /*counts*/,
                                    std::span<const int64_t> /*records*/) const {
    return {};
  }

  /// The metrics of the samples that an epoch trained on. By default metrics() without records.
  virtual std::vector<Metric> training_metrics(std::span<const int64_t> counts) const {
    return metrics(counts, {});
  }

  /// Whether the task implements predict().
  virtual bool predicts() const { return false; }

  virtual PredictionFile prediction_file() const { return {}; }

  /// The network's answer about each image of a batch; may wait for the device.
  virtual std::vector<Prediction> predict(const Outputs& /*outputs*/,
                                          std::span<const UnlabelledImage> /*images*/) const {
    return {};
  }

  /// Number of samples that pictures() needs. Unless it is 0 or the task evaluates one by one, the
  /// first dimension of all outputs must be that of the samples.
  virtual int64_t pictured_samples() const { return 0; }

  /// Pictures of what the network does, after an evaluation. Called in evaluation mode on the ranks
  /// that write to a run's folder: it must not wait for other ranks, but may wait for the device.
  /// @param seen the samples to show: pictured_samples(), or fewer if the rank had fewer
  /// @param normalization of the data set
  virtual std::vector<Picture> pictures(
      [[maybe_unused]] std::span<const Seen> seen,
      [[maybe_unused]] const data::Normalization& normalization) const {
    return {};
  }
};

/// The registry behind `task: {type: classification}`. A custom task is a class and a line of
/// registration, as for data::DatasetKind. make() throws base::UserError if the data set does not
/// suit the task. The data set outlives the task.
struct TaskKind {
  using Registry = config::Registry<std::unique_ptr<Task>, const data::Dataset&>;
  static Registry& registry();
};

}  // namespace syncbn::train
