#include <ATen/Functions.h>
#include <syncbn/config/schema.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/models/model.h>
#include <syncbn/train/loss.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "common/mean_of_present.h"
#include "records/pictures.h"
#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

struct SegmentationOptions {
  config::Component<LossKind> loss{"cross_entropy"};
  std::vector<double> class_weights;
  double aux_weight = 0.5;
  int64_t samples = 4;

  static void describe(config::Schema<SegmentationOptions>& schema) {
    schema.field("loss", &SegmentationOptions::loss, "how far an answer is from the label");
    describe_loss_weights(schema);
    describe_samples(schema, "images of the evaluation split");
  }
};

class Segmentation : public Task {
 public:
  Segmentation(const SegmentationOptions& options, const data::SampleDataset& dataset)
      : num_classes_(dataset.num_classes()),
        ignore_index_(dataset.ignore_index()),
        options_(options),
        loss_(options.loss.make(LossArgs{.num_classes = num_classes_,
                                         .class_weights = options.class_weights,
                                         .ignored_label = ignore_index_})),
        names_(class_names(dataset)) {}

  void attach(models::Model& model) override { expect_predictions(LabelKind::kPixels, model); }

  at::Tensor loss(const Outputs& outputs, const at::Tensor& target) const override {
    return with_auxiliary(outputs, options_.aux_weight,
                          [&](const at::Tensor& logits) { return loss_->mean(logits, target); });
  }

  at::Tensor loss_sum(const Outputs& outputs, const at::Tensor& target) const override {
    const at::Tensor sum = loss_->each(outputs.front(), target).sum(at::kDouble);
    return at::stack({sum, target.ne(ignore_index_).sum().to(at::kDouble)});
  }

  int64_t num_counts() const override { return num_classes_ * num_classes_; }

  /// The confusion matrix: a row for each label, a column for each prediction.
  at::Tensor counts(const Outputs& outputs, const at::Tensor& target) const override {
    const at::Tensor predicted = outputs.front().argmax(1);
    // Counts ignored pixels after the matrix: leaving them out would wait for the device.
    const at::Tensor cell =
        at::where(target.eq(ignore_index_), num_counts(), target * num_classes_ + predicted)
            .flatten();
    return at::zeros({num_counts() + 1}, target.options())
        .scatter_add_(0, cell, at::ones_like(cell))
        .narrow(0, 0, num_counts());
  }

  std::vector<Metric> metrics(std::span<const int64_t> counts,
                              std::span<const int64_t> /*records*/) const override {
    std::vector<double> ious;
    std::vector<double> accuracies;
    int64_t right = 0;
    int64_t pixels = 0;
    for (int64_t i = 0; i < num_classes_; ++i) {
      const Class one = class_of(counts, i);
      ious.push_back(one.iou());
      accuracies.push_back(share_of(one.right, one.labelled));
      right += one.right;
      pixels += one.labelled;
    }
    std::vector<Metric> all = {
        {.name = "miou", .value = mean_of_present(ious, 0), .is_share = true},
        {.name = "pixel_accuracy",
         .value = pixels > 0 ? share_of(right, pixels) : 0,
         .is_share = true}};
    add_by_class(all, "iou", names_, ious);
    add_by_class(all, "accuracy", names_, accuracies);
    return all;
  }

  std::string remark(std::span<const int64_t> counts,
                     std::span<const int64_t> /*records*/) const override {
    std::vector<std::string> absent;
    for (int64_t i = 0; i < num_classes_; ++i) {
      if (class_of(counts, i).is_absent()) absent.push_back(names_[static_cast<size_t>(i)]);
    }
    return leaves_out("miou", "pixel", absent);
  }

  std::vector<Table> tables(std::span<const int64_t> counts,
                            std::span<const int64_t> /*records*/) const override {
    std::map<int64_t, int64_t> cells;
    for (size_t cell = 0; cell < counts.size(); ++cell) {
      if (counts[cell] > 0) cells[static_cast<int64_t>(cell)] = counts[cell];
    }
    return {confusion_table(names_, cells)};
  }

  int64_t pictured_samples() const override { return options_.samples; }

  /// "samples": a row for each image: as it is, with its labels, and with the network's.
  std::vector<Picture> pictures(std::span<const Seen> seen,
                                const data::Normalization& normalization) const override {
    std::vector<at::Tensor> tiles;
    for (const auto& [batch, outputs] : seen) {
      for (int64_t i = 0; i < batch.size() && std::ssize(tiles) < 3 * options_.samples; ++i) {
        const auto [pixels, step] = thumbnail(batch, i, normalization);
        const auto small = [&](const at::Tensor& labels) {
          return labels.slice(0, 0, std::nullopt, step)
              .slice(1, 0, std::nullopt, step)
              .narrow(0, 0, pixels.size(0))
              .narrow(1, 0, pixels.size(1))
              .cpu();
        };
        const at::Tensor answers = outputs.front()[i].argmax(0);
        tiles.push_back(pixels);
        tiles.push_back(with_mask(pixels, small(batch.target[i]), ignore_index_));
        tiles.push_back(with_mask(pixels, small(answers), ignore_index_));
      }
    }
    if (tiles.empty()) return {};
    return {{.name = "samples", .image = tiled(tiles, /*columns=*/3)}};
  }

  bool predicts() const override { return true; }

  std::vector<Prediction> predict(const Outputs& outputs,
                                  std::span<const UnlabelledImage> images) const override {
    std::vector<Prediction> all;
    for (size_t i = 0; i < images.size(); ++i) {
      const auto& [file, index, input, size] = images[i];
      const at::Tensor logits =
          at::upsample_bilinear2d(outputs.front()
                                      .narrow(0, static_cast<int64_t>(i), 1)
                                      .narrow(2, 0, input.height)
                                      .narrow(3, 0, input.width),
                                  {size.height, size.width}, /*align_corners=*/false);
      const at::Tensor labels = logits.argmax(1).to(at::kByte).cpu();
      data::Image mask(size.width, size.height, /*channels=*/1);
      std::copy_n(labels.const_data_ptr<uint8_t>(), mask.pixels.size(), mask.pixels.begin());
      all.push_back({.rows = {}, .mask = std::move(mask)});
    }
    return all;
  }

 private:
  /// Pixel counts of a class.
  struct Class {
    int64_t labelled = 0, predicted = 0, right = 0;

    bool is_absent() const { return labelled + predicted == 0; }
    /// NaN if the class is absent.
    double iou() const { return share_of(right, labelled + predicted - right); }
  };

  Class class_of(std::span<const int64_t> counts, int64_t index) const {
    Class sums;
    for (int64_t i = 0; i < num_classes_; ++i) {
      sums.labelled += counts[static_cast<size_t>(index * num_classes_ + i)];
      sums.predicted += counts[static_cast<size_t>(i * num_classes_ + index)];
    }
    sums.right = counts[static_cast<size_t>(index * num_classes_ + index)];
    return sums;
  }

  int64_t num_classes_;
  int64_t ignore_index_;
  SegmentationOptions options_;
  std::unique_ptr<Loss> loss_;
  std::vector<std::string> names_;
};

std::unique_ptr<Task> make_segmentation(const SegmentationOptions& options,
                                        const data::Dataset& dataset) {
  expect_labels(LabelKind::kPixels, dataset);
  return std::make_unique<Segmentation>(options, dynamic_cast<const data::SampleDataset&>(dataset));
}

}  // namespace

void add_segmentation(TaskKind::Registry& registry) {
  registry.add<SegmentationOptions>("segmentation", "a class for each pixel", make_segmentation);
}

}  // namespace syncbn::train
