#include <ATen/Functions.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/models/model.h>

#include <algorithm>

#include "tasks/tasks.h"

namespace syncbn::train {

std::string shown(const Metric& metric, double value) {
  return metric.is_share ? fmt::format("{:.2f} %", 100 * value) : fmt::format("{:.4f}", value);
}

data::Batch Task::augment(const data::Batch& batch, data::SampleRandom& /*random*/) const {
  return batch;
}

Task::Outputs Task::forward(models::Model& model, size_t /*turn*/, const data::Batch& batch) const {
  return model.forward_all(batch.data);
}

std::string Task::remark(std::span<const int64_t> /*counts*/) const {
  return {};
}

std::vector<Prediction> Task::predict(const Outputs& /*outputs*/,
                                      std::span<const UnlabelledImage> /*images*/) const {
  throw base::UserError("predict: a network of this task says nothing about images");
}

std::vector<Picture> Task::pictures(const data::Normalization& /*normalization*/) const {
  return {};
}

TaskKind::Registry& TaskKind::registry() {
  static Registry registry = [] {
    Registry made;
    add_classification(made);
    add_segmentation(made);
    add_gan(made);
    return made;
  }();
  return registry;
}

ClassWeights::ClassWeights(const std::vector<double>& weights, int64_t num_classes) {
  if (weights.empty()) return;
  if (std::ssize(weights) != num_classes) {
    throw base::UserError(fmt::format("task.class_weights has {}, the data has {} classes",
                                      base::counted(std::ssize(weights), "value"), num_classes));
  }
  if (std::ranges::all_of(weights, [](double weight) { return weight == 0; })) {
    throw base::UserError("task.class_weights: all are 0, so there is nothing to learn");
  }
  weights_ = at::tensor(weights, at::kFloat);
}

at::Tensor ClassWeights::like(const at::Tensor& like) const {
  if (!weights_.defined()) return {};
  if (weights_.device() != like.device()) weights_ = weights_.to(like.device());
  return weights_.to(like.scalar_type());
}

}  // namespace syncbn::train
