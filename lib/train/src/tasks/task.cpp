#include <ATen/Functions.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/boxes.h>
#include <syncbn/models/detector.h>
#include <syncbn/models/gan.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "common/csv.h"
#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

struct LabelText {
  const char* task;
  const char* labels;
  const char* data;
  const char* model;
};

LabelText text_of(LabelKind kind) {
  constexpr std::array<LabelText, 3> kTexts = {{
      {"classification", "one label for each image", "image_folder", "resnet50"},
      {"segmentation", "a label for each pixel", "segmentation_folder", "deeplabv3_resnet50"},
      {"detection", "boxes with labels", "coco", "retinanet_resnet50_fpn"},
  }};
  return kTexts.at(static_cast<size_t>(kind));
}

LabelKind kind_of(const models::Model& model) {
  if (dynamic_cast<const models::Detector*>(&model) != nullptr) return LabelKind::kBoxes;
  return model.labels_pixels() ? LabelKind::kPixels : LabelKind::kImages;
}

}  // namespace

std::string shown(const Metric& metric, double value) {
  if (metric.is_share) return fmt::format("{:.2f} %", 100 * value);
  return std::abs(value) < 1e6 ? fmt::format("{:.4f}", value) : fmt::format("{:.3e}", value);
}

Task::Outputs Task::forward(models::Model& model, size_t /*turn*/, const data::Batch& batch) const {
  return model.forward_all(batch.data);
}

at::Tensor Task::records(const Outputs& /*outputs*/, const at::Tensor& /*target*/) const {
  return at::empty({0}, at::kLong);
}

TaskKind::Registry& TaskKind::registry() {
  static Registry registry("task", {add_classification, add_detection, add_segmentation, add_gan});
  return registry;
}

LabelKind label_kind(const data::Dataset& dataset) {
  if (dynamic_cast<const data::BoxDataset*>(&dataset) != nullptr) return LabelKind::kBoxes;
  return data::labels_pixels(dataset) ? LabelKind::kPixels : LabelKind::kImages;
}

void expect_labels(LabelKind kind, const data::Dataset& dataset) {
  const LabelKind own = label_kind(dataset);
  if (own == kind) return;
  throw base::UserError(
      fmt::format("task: {} needs {}, and this data has {}; set task to {}, or choose data such as "
                  "{}",
                  text_of(kind).task, text_of(kind).labels, text_of(own).labels, text_of(own).task,
                  text_of(kind).data));
}

void expect_predictions(LabelKind kind, const models::Model& model) {
  if (dynamic_cast<const models::Gan*>(&model) != nullptr) {
    throw base::UserError("it generates images; set task to gan, or choose another network");
  }
  const LabelKind own = kind_of(model);
  if (own == kind) return;
  throw base::UserError(fmt::format(
      "it predicts {}, and task {} needs {}; choose a network such as {}", text_of(own).labels,
      text_of(kind).task, text_of(kind).labels, text_of(kind).model));
}

std::vector<std::string> class_names(const data::Dataset& dataset) {
  std::vector<std::string> names = dataset.class_names();
  for (int64_t i = std::ssize(names); i < dataset.num_classes(); ++i) {
    names.push_back(std::to_string(i));
  }
  return names;
}

std::vector<std::string> class_keys(const std::vector<std::string>& names) {
  std::vector<std::string> keys(names.size());
  std::set<std::string> taken;
  for (const bool has_space : {false, true}) {
    for (size_t i = 0; i < names.size(); ++i) {
      if ((names[i].find(' ') != std::string::npos) != has_space) continue;
      // JSON is UTF-8; the name of a folder may be anything.
      std::string key = base::printable(names[i]);
      std::ranges::replace(key, ' ', '_');
      keys[i] = key;
      for (int number = 2; !taken.insert(keys[i]).second; ++number) {
        keys[i] = fmt::format("{}_{}", key, number);
      }
    }
  }
  return keys;
}

std::string leaves_out(const std::string& metric, const std::string& thing,
                       const std::vector<std::string>& absent) {
  constexpr size_t kShown = 10;
  if (absent.empty()) return {};
  return fmt::format("{} leaves out {} that no {} has: {}", metric,
                     absent.size() == 1 ? "a class" : "classes", thing,
                     base::join_some(absent, ", ", kShown));
}

double share_of(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole)
                   : std::numeric_limits<double>::quiet_NaN();
}

void add_by_class(std::vector<Metric>& metrics, const std::string& measure,
                  const std::vector<std::string>& names, std::span<const double> values) {
  const std::vector<std::string> keys = class_keys(names);
  for (size_t i = 0; i < values.size(); ++i) {
    metrics.push_back({.name = measure + "_" + keys[i], .value = values[i], .is_share = true});
  }
}

Table confusion_table(const std::vector<std::string>& names,
                      const std::map<int64_t, int64_t>& cells) {
  constexpr int64_t kMaxColumns = 2000;
  const int64_t classes = std::ssize(names);
  std::vector<std::string> fields;
  for (const std::string& name : names) fields.push_back(csv_field(name));
  if (classes > kMaxColumns) {
    std::string text = "label,answer,count\n";
    for (const auto& [cell, count] : cells) {
      text += fmt::format("{},{},{}\n", fields[static_cast<size_t>(cell / classes)],
                          fields[static_cast<size_t>(cell % classes)], count);
    }
    return {.name = "confusion.csv", .text = std::move(text)};
  }
  std::string text = "label/answer," + base::join(fields, ",");
  auto next = cells.begin();
  for (int64_t cell = 0; cell < classes * classes; ++cell) {
    if (cell % classes == 0) text += "\n" + fields[static_cast<size_t>(cell / classes)];
    const bool is_next = next != cells.end() && next->first == cell;
    text += is_next ? fmt::format(",{}", (next++)->second) : ",0";
  }
  return {.name = "confusion.csv", .text = text + "\n"};
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
