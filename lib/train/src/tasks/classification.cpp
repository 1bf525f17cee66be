#include <ATen/Functions.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/config/schema.h>
#include <syncbn/data/batch_transforms.h>
#include <syncbn/train/loss.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <utility>

#include "common/csv.h"
#include "common/mean_of_present.h"
#include "common/naming.h"
#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

constexpr int64_t kTop = 5;  // classes of the second accuracy, if there are more
constexpr double kMaxAlpha = 100;

struct ClassificationOptions {
  config::Component<LossKind> loss{"cross_entropy"};
  double label_smoothing = 0;
  std::vector<double> class_weights;
  double mixup = 0;
  double cutmix = 0;
  double aux_weight = 0.3;

  static void describe(config::Schema<ClassificationOptions>& schema) {
    using Options = ClassificationOptions;
    schema.field("loss", &Options::loss, "how far an answer is from the label");
    schema
        .field("label_smoothing", &Options::label_smoothing,
               "share of the target that is spread evenly over all classes")
        .fraction();
    describe_loss_weights(schema);
    schema
        .field("mixup", &Options::mixup,
               "alpha of MixUp, which blends each image with another; 0: off")
        .between(0, kMaxAlpha);
    schema
        .field("cutmix", &Options::cutmix,
               "alpha of CutMix, which pastes a part of another image; 0: off. With mixup, each "
               "batch gets one of them, evenly often")
        .between(0, kMaxAlpha);
  }
};

class Classification : public Task {
 public:
  Classification(ClassificationOptions options, const data::Dataset& dataset)
      : options_(std::move(options)),
        num_classes_(dataset.num_classes()),
        loss_(options_.loss.make(LossArgs{.num_classes = num_classes_,
                                          .class_weights = options_.class_weights,
                                          .label_smoothing = options_.label_smoothing})),
        names_(class_names(dataset)) {}

  void attach(models::Model& model) override { expect_predictions(LabelKind::kImages, model); }

  bool targets_are_classes() const override { return true; }

  data::Batch augment(const data::Batch& batch, data::SampleRandom& random) const override {
    const double mixup = options_.mixup;
    const double cutmix = options_.cutmix;
    if (mixup == 0 && cutmix == 0) return batch;
    if (cutmix == 0 || (mixup > 0 && random.chance(0.5))) {
      return data::mixup(batch, num_classes_, mixup, random);
    }
    return data::cutmix(batch, num_classes_, cutmix, random);
  }

  at::Tensor loss(const Outputs& outputs, const at::Tensor& target) const override {
    return with_auxiliary(outputs, options_.aux_weight,
                          [&](const at::Tensor& output) { return loss_->mean(output, target); });
  }

  /// Rounds each sample's loss to whole units, whose sums are exact in float64: they do not depend
  /// on batches and ranks.
  at::Tensor loss_sum(const Outputs& outputs, const at::Tensor& target) const override {
    constexpr double kUnits = 1 << 24;
    const at::Tensor losses = loss_->each(outputs.front(), target);
    const at::Tensor sum = (losses.to(at::kDouble) * kUnits).round().sum() / kUnits;
    return at::stack({sum, at::full_like(sum, losses.size(0))});
  }

  at::Tensor verdicts(const Outputs& outputs, const at::Tensor& target) const override {
    const at::Tensor& output = outputs.front();
    return at::stack({loss_->each(output, target).to(at::kDouble), target.to(at::kDouble),
                      output.argmax(1).to(at::kDouble)},
                     1);
  }

  int64_t num_counts() const override { return has_top() ? 3 : 2; }

  /// Samples, right answers, and samples whose class is among the kTop likeliest. A mixed
  /// sample counts for the class with the larger share.
  at::Tensor counts(const Outputs& outputs, const at::Tensor& target) const override {
    const at::Tensor& output = outputs.front();
    const at::Tensor label = target.dim() > 1 ? target.argmax(1) : target;
    std::vector<at::Tensor> counts = {at::full({}, output.size(0), label.options()),
                                      output.argmax(1).eq(label).sum()};
    if (has_top()) {
      const at::Tensor top = std::get<1>(output.topk(kTop, 1));
      counts.push_back(top.eq(label.unsqueeze(1)).sum());
    }
    return at::stack(counts);
  }

  /// The cell of each sample in the confusion matrix. The matrix itself, in counts(), would add
  /// num_classes² values to each step of training.
  at::Tensor records(const Outputs& outputs, const at::Tensor& target) const override {
    return target * num_classes_ + outputs.front().argmax(1);
  }

  std::vector<Metric> training_metrics(std::span<const int64_t> counts) const override {
    const int64_t samples = std::max<int64_t>(counts[0], 1);  // without any, none is right
    const auto share = [&](size_t part) { return share_of(counts[part], samples); };
    std::vector<Metric> all = {{.name = "accuracy", .value = share(1), .is_share = true}};
    if (has_top()) all.push_back({.name = "top5_accuracy", .value = share(2), .is_share = true});
    return all;
  }

  std::vector<Metric> metrics(std::span<const int64_t> counts,
                              std::span<const int64_t> records) const override {
    const std::vector<double> recalls = recalls_of(records);
    std::vector<Metric> all = training_metrics(counts);
    all.push_back(
        {.name = "mean_class_accuracy", .value = mean_of_present(recalls, 0), .is_share = true});
    add_by_class(all, "accuracy", names_, recalls);
    return all;
  }

  std::string remark(std::span<const int64_t> /*counts*/,
                     std::span<const int64_t> records) const override {
    if (num_classes_ == 1) {
      return "the data has one class only: every network is right without training";
    }
    const std::vector<double> recalls = recalls_of(records);
    std::vector<std::string> absent;
    for (size_t i = 0; i < recalls.size(); ++i) {
      if (std::isnan(recalls[i])) absent.push_back(names_[i]);
    }
    return leaves_out("mean_class_accuracy", "sample", absent);
  }

  std::vector<Table> tables(std::span<const int64_t> /*counts*/,
                            std::span<const int64_t> records) const override {
    return {confusion_table(names_, cells_of(records))};
  }

  bool predicts() const override { return true; }

  PredictionFile prediction_file() const override {
    return {.name = "predictions.csv",
            .opening = "file,class,probability\n",
            .separator = "",
            .closing = ""};
  }

  std::vector<Prediction> predict(const Outputs& outputs,
                                  std::span<const UnlabelledImage> images) const override {
    const at::Tensor probabilities = loss_->probabilities(outputs.front());
    const auto [highest, labels] = probabilities.to(at::kDouble).cpu().max(1);
    std::vector<Prediction> all;
    for (size_t i = 0; i < images.size(); ++i) {
      const auto place = static_cast<int64_t>(i);
      const std::string name = class_name(names_, labels[place].item<int64_t>());
      all.push_back({.rows = {fmt::format("{},{},{:.6f}\n", csv_field(images[i].file),
                                          csv_field(name), highest[place].item<double>())}});
    }
    return all;
  }

 private:
  /// Number of samples in each cell of the confusion matrix that has any.
  std::map<int64_t, int64_t> cells_of(std::span<const int64_t> records) const {
    std::map<int64_t, int64_t> cells;
    for (const int64_t cell : records) {
      // A custom data set may have PyTorch's ignored label, -100.
      if (cell >= 0 && cell < num_classes_ * num_classes_) ++cells[cell];
    }
    return cells;
  }

  /// The share of each class's samples that are right; NaN for a class without samples.
  std::vector<double> recalls_of(std::span<const int64_t> records) const {
    const auto classes = static_cast<size_t>(num_classes_);
    std::vector<int64_t> samples(classes);
    std::vector<int64_t> right(classes);
    for (const auto& [cell, count] : cells_of(records)) {
      const int64_t label = cell / num_classes_;
      samples[static_cast<size_t>(label)] += count;
      if (cell % num_classes_ == label) right[static_cast<size_t>(label)] += count;
    }
    std::vector<double> recalls;
    for (size_t i = 0; i < classes; ++i) recalls.push_back(share_of(right[i], samples[i]));
    return recalls;
  }

  bool has_top() const { return num_classes_ > kTop; }

  ClassificationOptions options_;
  int64_t num_classes_;
  std::unique_ptr<Loss> loss_;
  std::vector<std::string> names_;
};

std::unique_ptr<Task> make_classification(const ClassificationOptions& options,
                                          const data::Dataset& dataset) {
  expect_labels(LabelKind::kImages, dataset);
  if ((options.mixup > 0 || options.cutmix > 0) && dataset.sample_shape().size() != 3) {
    throw base::UserError("task: mixup and cutmix need images of [channels, height, width]");
  }
  return std::make_unique<Classification>(options, dataset);
}

}  // namespace

void add_classification(TaskKind::Registry& registry) {
  registry.add<ClassificationOptions>("classification", "one class for each image",
                                      make_classification);
}

}  // namespace syncbn::train
