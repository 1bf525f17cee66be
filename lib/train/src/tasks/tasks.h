#pragma once

// Shared by the tasks of this folder.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <syncbn/config/schema.h>
#include <syncbn/train/task.h>

namespace syncbn::train {

// Each registers one task.
void add_classification(TaskKind::Registry& registry);
void add_detection(TaskKind::Registry& registry);
void add_segmentation(TaskKind::Registry& registry);
void add_gan(TaskKind::Registry& registry);

/// What carries a label.
enum class LabelKind { kImages, kPixels, kBoxes };

LabelKind label_kind(const data::Dataset& dataset);

/// @throws base::UserError if the data has another kind of labels
void expect_labels(LabelKind kind, const data::Dataset& dataset);
/// @throws base::UserError if the network predicts another kind; the message calls it "it"
void expect_predictions(LabelKind kind, const models::Model& model);

/// A name for each class; its number if the data has no names.
std::vector<std::string> class_names(const data::Dataset& dataset);

/// The part of a metric's name that stands for each class: the class's name with "_" for spaces,
/// since it becomes a key of the log, a column, a tag of TensorBoard and a word of a command line.
/// If two would be the same, the one without spaces keeps it, and the others get "_2", "_3" and so
/// on.
std::vector<std::string> class_keys(const std::vector<std::string>& names);

/// "miou leaves out a class that no pixel has: star"; empty if no class is absent.
/// @param thing what has a class, such as "pixel"
std::string leaves_out(const std::string& metric, const std::string& thing,
                       const std::vector<std::string>& absent);

/// NaN if `whole` is 0.
double share_of(int64_t part, int64_t whole);

/// Adds the share MEASURE_KEY of each class, where KEY is from class_keys().
void add_by_class(std::vector<Metric>& metrics, const std::string& measure,
                  const std::vector<std::string>& names, std::span<const double> values);

/// confusion.csv: a row for each label and a column for each answer or, with more than 2000
/// classes, a row for each cell that is not 0.
/// @param names of the classes
/// @param cells the counts that are not 0, by label * number of classes + answer
Table confusion_table(const std::vector<std::string>& names,
                      const std::map<int64_t, int64_t>& cells);

/// The keys `class_weights` and `aux_weight`.
template <class Options>
void describe_loss_weights(config::Schema<Options>& schema) {
  schema
      .field("class_weights", &Options::class_weights,
             "the loss's weight of each class; empty: all 1")
      .at_least(0);
  schema.field("aux_weight", &Options::aux_weight, "weight of the loss of each auxiliary head")
      .at_least(0);
}

/// `task.class_weights`. Not thread-safe.
class ClassWeights {
 public:
  /// @throws base::UserError if the number of weights is wrong or all are 0. No weights: all are 1.
  ClassWeights(const std::vector<double>& weights, int64_t num_classes);

  /// [num_classes], of the type and on the device of `like`; undefined if there are none. Only the
  /// first call waits for the device.
  at::Tensor like(const at::Tensor& like) const;

 private:
  mutable at::Tensor weights_;
};

/// The loss of the network's logits, and `aux_weight` times that of each auxiliary head.
template <class LossOf>
at::Tensor with_auxiliary(const Task::Outputs& outputs, double aux_weight, const LossOf& loss_of) {
  at::Tensor loss = loss_of(outputs.front());
  for (size_t i = 1; i < outputs.size(); ++i) loss = loss + aux_weight * loss_of(outputs[i]);
  return loss;
}

}  // namespace syncbn::train
