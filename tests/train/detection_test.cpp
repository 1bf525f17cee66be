#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/boxes.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/models/detector.h>
#include <syncbn/train/task.h>

#include <array>
#include <cmath>
#include <random>

#include "support/from_yaml.h"
#include "support/skip.h"
#include "support/thrown.h"
#include "train/pycocotools.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPhotos = 12;
constexpr data::ImageSize kOriginal = {.width = 300, .height = 240};
constexpr data::ImageSize kResized = {.width = 100, .height = 160};

/// Photographs with annotations. No test reads their pixels. Ids descend while indices ascend.
class Photos : public data::BoxDataset {
 public:
  Photos() {
    std::mt19937 random(1);
    const auto below = [&](uint32_t bound) { return static_cast<double>(random() % bound); };
    for (int64_t i = 0; i < kPhotos; ++i) {
      for (auto left = static_cast<int>(below(5)); left > 0; --left) {
        const double width = 20 + below(100), height = 20 + below(100);
        annotations_[static_cast<size_t>(i)].push_back({.label = static_cast<int64_t>(below(2)),
                                                        .x = below(150),
                                                        .y = below(100),
                                                        .width = width,
                                                        .height = height,
                                                        .area = width * height * 0.7,
                                                        .is_crowd = below(5) == 0});
      }
    }
  }

  int64_t size() const override { return kPhotos; }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return 3; }
  std::vector<std::string> class_names() const override { return {"cat", "dog", "bird"}; }
  std::vector<int64_t> sample_shape() const override { return {3, 160, 100}; }
  std::vector<int64_t> target_shape() const override { return {2, data::BoxTarget::kColumns}; }
  uint64_t fingerprint() const override { return 1; }
  void read_sample(int64_t, data::SampleRandom&, const data::SampleSlot&) const override {}

  std::span<const data::Annotation> annotations(int64_t index) const override {
    return annotations_[static_cast<size_t>(index)];
  }
  int64_t image_id(int64_t index) const override { return 100 - index; }
  int64_t category_id(int64_t label) const override { return 10 * label; }
  data::ImageSize original_size(int64_t) const override { return kOriginal; }

 private:
  std::array<std::vector<data::Annotation>, kPhotos> annotations_;
};

/// A network that returns its input as detections: [N, n, 6] with x1, y1, x2, y2, score, label.
class Echo : public models::Detector {
 public:
  at::Tensor forward(at::Tensor input) override { return input; }
  at::Tensor loss(const std::vector<at::Tensor>& outputs, const at::Tensor& target) const override {
    return outputs.front().mean() + target.select(2, 0).sum();
  }
  std::vector<models::Detections> detect(const std::vector<at::Tensor>& outputs,
                                         const at::Tensor& sizes) const override {
    EXPECT_EQ(sizes[0][0].item<int64_t>(), kResized.height);
    EXPECT_EQ(sizes[0][1].item<int64_t>(), kResized.width);
    std::vector<models::Detections> all;
    for (const at::Tensor& rows : outputs.front().unbind()) {
      all.push_back({.boxes = rows.slice(1, 0, 4),
                     .scores = rows.select(1, 4),
                     .labels = rows.select(1, 5).to(at::kLong)});
    }
    return all;
  }
};

/// The target [N, 2, 5] of the photos with these indices.
at::Tensor target_of(const std::vector<int64_t>& indices) {
  at::Tensor target = at::full({std::ssize(indices), 2, data::BoxTarget::kColumns},
                               data::BoxTarget::kUnused, at::kDouble);
  for (size_t i = 0; i < indices.size(); ++i) {
    const at::Tensor row = target[static_cast<int64_t>(i)][0];
    row[data::BoxTarget::kIndex] = indices[i];
    row[data::BoxTarget::kOriginalHeight] = kOriginal.height;
    row[data::BoxTarget::kOriginalWidth] = kOriginal.width;
    row[data::BoxTarget::kHeight] = kResized.height;
    row[data::BoxTarget::kWidth] = kResized.width;
  }
  return target.view(at::kLong);
}

class DetectionTest : public ::testing::Test {
 protected:
  DetectionTest() { task_->attach(detector_); }

  /// Detections in the resized image, some near each of its truths and some elsewhere.
  at::Tensor detections_of(int64_t index) const {
    std::mt19937 random(static_cast<uint32_t>(index));
    const auto below = [&](uint32_t bound) { return static_cast<float>(random() % bound); };
    std::vector<at::Tensor> rows;
    const auto add = [&](float x, float y, float width, float height, int64_t label) {
      rows.push_back(
          at::tensor({x, y, x + width, y + height, below(9) / 9, static_cast<float>(label)}));
    };
    for (const data::Annotation& truth : photos_.annotations(index)) {
      add(static_cast<float>(truth.x) / 3 + below(6) - 3, static_cast<float>(truth.y) / 1.5F,
          static_cast<float>(truth.width) / 3, static_cast<float>(truth.height) / 1.5F,
          truth.label);
    }
    for (int i = 0; i < 4; ++i) add(below(50), below(80), 10 + below(40), 10 + below(40), i % 3);
    return at::stack(rows).unsqueeze(0);
  }

  /// The metrics of an evaluation in which each rank has every `ranks`-th photo.
  std::vector<Metric> metrics(int64_t ranks) const {
    std::vector<int64_t> records;
    at::Tensor counts = at::zeros({task_->num_counts()}, at::kLong);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (int64_t i = rank; i < kPhotos; i += ranks) {
        const auto own = values_of(task_->records({detections_of(i)}, target_of({i})));
        records.insert(records.end(), own.begin(), own.end());
        counts += task_->counts({detections_of(i)}, target_of({i}));
      }
    }
    return task_->metrics(values_of(counts), records);
  }

  static std::vector<int64_t> values_of(const at::Tensor& counts) {
    return {counts.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>() + counts.numel()};
  }

  const Photos photos_;
  Echo detector_;
  const std::unique_ptr<Task> task_ = test::from_yaml<TaskKind>("detection", "task").make(photos_);
};

TEST_F(DetectionTest, MetricsAreTheSameForAnyNumberOfRanks) {
  const auto one = metrics(1);
  EXPECT_GT(one[0].value, 0.01);
  for (const int64_t ranks : {2, 3, 5}) {
    const auto many = metrics(ranks);
    ASSERT_EQ(many.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_TRUE(many[i].value == one[i].value ||
                  (std::isnan(one[i].value) && std::isnan(many[i].value)))
          << one[i].name;
    }
  }
}

TEST_F(DetectionTest, MetricsAreThoseOfPycocotoolsInPixelsOfTheOriginalImages) {
  SYNCBN_SKIP_UNLESS(test::python_has("pycocotools"), "pycocotools");
  std::vector<BoxImage> images;
  for (int64_t i = 0; i < kPhotos; ++i) {
    BoxImage image;
    image.id = photos_.image_id(i);
    for (const data::Annotation& one : photos_.annotations(i)) {
      image.truths.push_back(
          {one.label, {one.x, one.y, one.width, one.height}, one.area, one.is_crowd});
    }
    const at::Tensor rows = detections_of(i)[0].to(at::kDouble);
    for (const at::Tensor& row : rows.unbind()) {
      const auto v = row.accessor<double, 1>();
      image.detections.push_back({static_cast<int64_t>(v[5]),
                                  v[4],
                                  {v[0] * 3, v[1] * 1.5, (v[2] - v[0]) * 3, (v[3] - v[1]) * 1.5}});
    }
    images.push_back(image);
  }
  const auto expected = figures_of_pycocotools(images, 3);
  const auto found = metrics(2);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(std::isnan(found[i].value) ? -1 : found[i].value, expected[i], 1e-14)
        << found[i].name;
  }
  EXPECT_EQ(found[0].name, "map");
  EXPECT_EQ(found.back().name, "ap_bird");
}

TEST_F(DetectionTest, PredictionsAreInPixelsOfTheOriginalImages) {
  const std::vector<UnlabelledImage> images = {
      {.file = "caf\xe9.jpg", .index = 4, .input = kResized, .size = kOriginal}};
  const at::Tensor found = at::tensor({10.F, 20.F, 40.F, 60.F, 0.5F, 1.F}).view({1, 1, 6});
  const auto predictions = task_->predict({found}, images);
  ASSERT_EQ(predictions.size(), 1);
  ASSERT_EQ(predictions[0].rows.size(), 1);
  EXPECT_EQ(predictions[0].rows[0],
            R"({"file_name":"caf\\xe9.jpg","image_id":4,"category_id":10,)"
            R"("category":"dog","bbox":[30.0,30.0,90.0,60.0],"score":0.5})");
}

TEST_F(DetectionTest, ClassesWithoutTruthsAreNamed) {
  at::Tensor counts = at::zeros({task_->num_counts()}, at::kLong);
  EXPECT_EQ(task_->remark(values_of(counts), {}),
            "map leaves out classes that no image has: cat, dog, bird");
  for (int64_t i = 0; i < kPhotos; ++i) counts += task_->counts({}, target_of({i}));
  EXPECT_EQ(task_->remark(values_of(counts), {}), "map leaves out a class that no image has: bird");
}

TEST_F(DetectionTest, TheLossIsTheNetworksForEachImage) {
  const at::Tensor sum = task_->loss_sum({detections_of(3)}, target_of({3}));
  EXPECT_EQ(sum[1].item<double>(), 1);
  // Row 0 of the target contains the index 3, row 1 the label -1.
  EXPECT_FLOAT_EQ(sum[0].item<float>(), detections_of(3).mean().item<float>() + 2);
}

TEST_F(DetectionTest, PicturesShowAsManyOfTheBestBoxesAsThereAre) {
  at::Tensor target = target_of({3});
  const at::Tensor box = data::BoxTarget::decode(target)[0][1];
  box.copy_(at::tensor({0., 10., 20., 40., 60.}, at::kDouble));
  const at::Tensor found = at::tensor({5.F, 5.F, 30.F, 30.F, 0.2F, 2.F,  //
                                       50.F, 70.F, 90.F, 200.F, 0.9F, 1.F})
                               .view({1, 2, 6});
  const Task::Seen seen{
      .batch = {.data = at::zeros({1, 3, kResized.height, kResized.width}), .target = target},
      .outputs = {found}};
  const auto pictures = task_->pictures(std::array{seen}, {{0, 0, 0}, {1, 1, 1}});
  ASSERT_EQ(pictures.size(), 1);
  const data::Image& image = pictures.front().image;
  EXPECT_EQ(image.width, 2 * kResized.width);
  EXPECT_EQ(image.height, kResized.height);
  const auto pixel = [&](int64_t x, int64_t y) {
    const uint8_t* const at = image.row(y) + 3 * x;
    return std::array<int, 3>{at[0], at[1], at[2]};
  };
  using Color = std::array<int, 3>;
  const Color none{0, 0, 0}, cat{255, 0, 0}, dog{0, 255, 0};
  EXPECT_EQ(pixel(10, 20), cat);
  EXPECT_EQ(pixel(39, 59), cat);
  EXPECT_EQ(pixel(20, 40), none);
  EXPECT_EQ(pixel(9, 20), none);
  const int64_t right = kResized.width;
  EXPECT_EQ(pixel(right + 50, 70), dog);
  EXPECT_EQ(pixel(right + 89, kResized.height - 1), dog);  // the box continues below the image
  EXPECT_EQ(pixel(right + 70, kResized.height - 1), none);
  EXPECT_EQ(pixel(right + 5, 5), none);  // its box has a lower score
}

TEST_F(DetectionTest, DataOrANetworkOfAnotherTaskIsRefused) {
  const auto error = [](const auto& work) { return test::message_of<base::UserError>(work); };
  EXPECT_THAT(error([&] { test::from_yaml<TaskKind>("classification", "task").make(photos_); }),
              HasSubstr("needs one label for each image, and this data has boxes with labels; set "
                        "task to detection"));
  const auto synthetic =
      test::from_yaml<data::DatasetKind>("synthetic", "data").make(data::Split::kTest);
  EXPECT_THAT(error([&] { test::from_yaml<TaskKind>("detection", "task").make(*synthetic); }),
              HasSubstr("task: detection needs boxes with labels, and this data has one label for "
                        "each image; set task to classification, or choose data such as coco"));
  const auto resnet =
      test::from_yaml<models::ModelKind>("resnet18", "model").make(models::ModelArgs{});
  EXPECT_EQ(error([&] { task_->attach(*resnet); }),
            "it predicts one label for each image, and task detection needs boxes with labels; "
            "choose a network such as retinanet_resnet50_fpn");
  EXPECT_THAT(
      error([&] {
        test::from_yaml<TaskKind>("classification", "task").make(*synthetic)->attach(detector_);
      }),
      HasSubstr("it predicts boxes with labels, and task classification needs one label"));
}

}  // namespace
}  // namespace syncbn::train
