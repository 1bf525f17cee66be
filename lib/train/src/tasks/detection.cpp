#include <ATen/Functions.h>
#include <fmt/format.h>
#include <syncbn/base/text.h>
#include <syncbn/config/schema.h>
#include <syncbn/data/boxes.h>
#include <syncbn/models/detector.h>

#include <array>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "detection/average_precision.h"
#include "records/pictures.h"
#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

struct DetectionOptions {
  int64_t samples = 4;

  static void describe(config::Schema<DetectionOptions>& schema) {
    describe_samples(schema, "images of the evaluation split");
  }
};

/// Rounded to the digits that the file shows.
double rounded(double value) {
  return std::round(value * 1e4) / 1e4;
}

/// A MatchedDetection as a record.
using Record = std::array<int64_t, 6>;

class ObjectDetection : public Task {
 public:
  ObjectDetection(const DetectionOptions& options, const data::BoxDataset& dataset)
      : samples_(options.samples), dataset_(dataset.whole()), names_(class_names(dataset)) {}

  void attach(models::Model& model) override {
    expect_predictions(LabelKind::kBoxes, model);
    detector_ = &dynamic_cast<const models::Detector&>(model);
  }

  at::Tensor loss(const Outputs& outputs, const at::Tensor& target) const override {
    return detector_->loss(outputs, data::BoxTarget::decode(target));
  }

  /// Over images. Exact only if the batch is one image, since networks divide the loss by the
  /// number of boxes in the batch.
  at::Tensor loss_sum(const Outputs& outputs, const at::Tensor& target) const override {
    const auto images = static_cast<double>(target.size(0));
    const at::Tensor mean = loss(outputs, target);
    return at::stack({mean * images, at::full_like(mean, images)});
  }

  int64_t num_counts() const override { return std::ssize(names_) * int64_t{kNumAreas}; }

  /// Truths of each class in each range of area.
  at::Tensor counts(const Outputs& /*outputs*/, const at::Tensor& target) const override {
    std::vector<int64_t> counts(static_cast<size_t>(num_counts()));
    const at::Tensor samples = samples_of(target);
    for (int64_t i = 0; i < samples.size(0); ++i) {
      count_truths(truths_of(index_of(samples[i])), counts);
    }
    return at::tensor(counts, at::kLong).to(target.device());
  }

  bool counts_training() const override { return false; }
  bool evaluates_one_by_one() const override { return true; }

  /// The matched detections.
  at::Tensor records(const Outputs& outputs, const at::Tensor& target) const override {
    std::vector<int64_t> all;
    const at::Tensor samples = samples_of(target);
    const auto found = detector_->detect(outputs, samples.narrow(1, data::BoxTarget::kHeight, 2));
    for (size_t i = 0; i < found.size(); ++i) {
      const at::Tensor sample = samples[static_cast<int64_t>(i)];
      const int64_t index = index_of(sample);
      using Target = data::BoxTarget;
      const auto row = sample.accessor<double, 1>();
      const auto detections = scaled(found[i], row[Target::kOriginalWidth] / row[Target::kWidth],
                                     row[Target::kOriginalHeight] / row[Target::kHeight]);
      for (const MatchedDetection& one :
           match(dataset_.image_id(index), truths_of(index), detections)) {
        const auto record = std::bit_cast<Record>(one);
        all.insert(all.end(), record.begin(), record.end());
      }
    }
    return at::tensor(all, at::kLong);
  }

  std::vector<Metric> metrics(std::span<const int64_t> counts,
                              std::span<const int64_t> records) const override {
    const AveragePrecision result = average_precision(matched_of(records), counts);
    std::vector<Metric> all;
    for (size_t i = 0; i < result.summary.size(); ++i) {
      all.push_back({.name = kSummaryNames[i], .value = result.summary[i], .is_share = true});
    }
    add_by_class(all, "ap", names_, result.classes);
    return all;
  }

  std::vector<Table> tables(std::span<const int64_t> counts,
                            std::span<const int64_t> records) const override {
    const PrecisionCurves curves = precision_curves(matched_of(records), counts);
    std::string text = "recall";
    for (size_t t = 0; t < curves.size(); ++t)
      text += fmt::format(",iou_{:.2f}", 0.5 + 0.05 * static_cast<double>(t));
    for (size_t i = 0; i < kNumRecalls; ++i) {
      text += fmt::format("\n{:.2f}", 0.01 * static_cast<double>(i));
      for (const auto& curve : curves) {
        text += std::isnan(curve[i]) ? std::string(",") : fmt::format(",{:.4f}", curve[i]);
      }
    }
    return {{.name = "precision_recall.csv", .text = text + "\n"}};
  }

  std::string remark(std::span<const int64_t> counts,
                     std::span<const int64_t> /*records*/) const override {
    std::vector<std::string> absent;
    for (size_t i = 0; i < names_.size(); ++i) {
      if (counts[i * kNumAreas] == 0) absent.push_back(names_[i]);
    }
    return leaves_out("map", "image", absent);
  }

  int64_t pictured_samples() const override { return samples_; }

  /// "samples": a row for each image: with its boxes, and with as many of the network's, those with
  /// the highest scores.
  std::vector<Picture> pictures(std::span<const Seen> seen,
                                const data::Normalization& normalization) const override {
    std::vector<at::Tensor> tiles;
    for (const auto& [batch, outputs] : seen) {  // of one image each
      const at::Tensor samples = samples_of(batch.target);
      const auto found = detector_->detect(outputs, samples.narrow(1, data::BoxTarget::kHeight, 2));
      const auto [pixels, step] = thumbnail(batch, 0, normalization);
      const at::Tensor rows = data::BoxTarget::decode(batch.target)[0].cpu();
      const at::Tensor boxes = rows.slice(0, 1);
      const at::Tensor used = boxes.index({boxes.select(1, data::BoxTarget::kLabel).ge(0)});
      at::Tensor truth = pixels.clone();
      draw_boxes(truth, used.narrow(1, data::BoxTarget::kX1, 4),
                 used.select(1, data::BoxTarget::kLabel).to(at::kLong), step);
      const int64_t shown = std::min(used.size(0), found.front().scores.size(0));
      const at::Tensor best = std::get<1>(found.front().scores.sort(0, /*descending=*/true));
      const at::Tensor chosen = best.narrow(0, 0, shown);
      at::Tensor answers = pixels.clone();
      draw_boxes(answers, found.front().boxes.index_select(0, chosen),
                 found.front().labels.index_select(0, chosen), step);
      tiles.push_back(truth);
      tiles.push_back(answers);
    }
    if (tiles.empty()) return {};
    return {{.name = "samples", .image = tiled(tiles, /*columns=*/2)}};
  }

  bool predicts() const override { return true; }

  /// COCO's format for results, with the image's file name added.
  PredictionFile prediction_file() const override {
    return {.name = "detections.json", .opening = "[\n", .separator = ",\n", .closing = "\n]\n"};
  }

  std::vector<Prediction> predict(const Outputs& outputs,
                                  std::span<const UnlabelledImage> images) const override {
    std::vector<double> sizes;
    for (const UnlabelledImage& image : images) {
      sizes.push_back(static_cast<double>(image.input.height));
      sizes.push_back(static_cast<double>(image.input.width));
    }
    const auto found = detector_->detect(
        outputs, at::tensor(sizes, at::kDouble).view({-1, 2}).to(outputs.front().device()));
    std::vector<Prediction> all;
    for (size_t i = 0; i < images.size(); ++i) {
      const auto& [file, index, input, size] = images[i];
      const auto ratio = [](int64_t a, int64_t b) {
        return static_cast<double>(a) / static_cast<double>(b);
      };
      Prediction prediction;
      for (const Detection& one :
           scaled(found[i], ratio(size.width, input.width), ratio(size.height, input.height))) {
        const nlohmann::ordered_json row = {
            {"file_name", base::printable(file)},  // JSON is UTF-8
            {"image_id", index},
            {"category_id", dataset_.category_id(one.label)},
            {"category", base::printable(names_[static_cast<size_t>(one.label)])},
            {"bbox",
             {rounded(one.box.x), rounded(one.box.y), rounded(one.box.width),
              rounded(one.box.height)}},
            {"score", rounded(one.score)}};
        prediction.rows.push_back(row.dump());
      }
      all.push_back(std::move(prediction));
    }
    return all;
  }

 private:
  /// Row 0 of each target: float64 [N, BoxTarget::kColumns] on the CPU. Waits for the device.
  static at::Tensor samples_of(const at::Tensor& target) {
    return data::BoxTarget::decode(target).select(1, 0).cpu();
  }

  /// The sample's index in data::BoxDataset::whole().
  static int64_t index_of(const at::Tensor& sample) {
    return static_cast<int64_t>(sample[data::BoxTarget::kIndex].item<double>());
  }

  std::vector<Truth> truths_of(int64_t index) const {
    std::vector<Truth> truths;
    for (const data::Annotation& one : dataset_.annotations(index)) {
      truths.push_back({.label = one.label,
                        .box = {one.x, one.y, one.width, one.height},
                        .area = one.area,
                        .is_crowd = one.is_crowd});
    }
    return truths;
  }

  /// @param corners [N, 4]: x1, y1, x2, y2, in an image that is `step` times as large as `pixels`
  static void draw_boxes(at::Tensor& pixels, const at::Tensor& corners, const at::Tensor& labels,
                         int64_t step) {
    const at::Tensor scaled = corners.to(at::kCPU, at::kDouble)
                                  .nan_to_num(0)
                                  .div(step)
                                  .clamp(-1e6, 1e6)
                                  .round()
                                  .to(at::kLong);
    const at::Tensor host_labels = labels.cpu();
    const auto rows = scaled.accessor<int64_t, 2>();
    for (int64_t i = 0; i < scaled.size(0); ++i) {
      const auto row = rows[i];
      draw_box(pixels,
               {.left = row[0], .top = row[1], .width = row[2] - row[0], .height = row[3] - row[1]},
               host_labels.const_data_ptr<int64_t>()[i]);
    }
  }

  /// Detections in pixels of the original image.
  static std::vector<Detection> scaled(const models::Detections& found, double across,
                                       double down) {
    const at::Tensor boxes = found.boxes.to(at::kCPU, at::kDouble);
    const at::Tensor scores = found.scores.to(at::kCPU, at::kDouble);
    const at::Tensor labels = found.labels.cpu();
    const auto corners = boxes.accessor<double, 2>();
    std::vector<Detection> detections;
    for (int64_t i = 0; i < boxes.size(0); ++i) {
      const PixelBox box{.x = corners[i][0] * across,
                         .y = corners[i][1] * down,
                         .width = (corners[i][2] - corners[i][0]) * across,
                         .height = (corners[i][3] - corners[i][1]) * down};
      detections.push_back({.label = labels.const_data_ptr<int64_t>()[i],
                            .score = scores.const_data_ptr<double>()[i],
                            .box = box});
    }
    return detections;
  }

  static std::vector<MatchedDetection> matched_of(std::span<const int64_t> records) {
    std::vector<MatchedDetection> matched;
    for (size_t i = 0; i < records.size(); i += Record{}.size()) {
      Record record{};
      std::ranges::copy(records.subspan(i, record.size()), record.begin());
      matched.push_back(std::bit_cast<MatchedDetection>(record));
    }
    return matched;
  }

  int64_t samples_;
  const data::BoxDataset& dataset_;
  std::vector<std::string> names_;
  const models::Detector* detector_ = nullptr;
};

std::unique_ptr<Task> make_detection(const DetectionOptions& options,
                                     const data::Dataset& dataset) {
  expect_labels(LabelKind::kBoxes, dataset);
  return std::make_unique<ObjectDetection>(options, dynamic_cast<const data::BoxDataset&>(dataset));
}

}  // namespace

void add_detection(TaskKind::Registry& registry) {
  registry.add<DetectionOptions>("detection", "boxes around objects", make_detection);
}

}  // namespace syncbn::train
