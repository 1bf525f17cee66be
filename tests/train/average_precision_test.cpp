#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>

#include "detection/average_precision.h"
#include "support/python.h"
#include "support/skip.h"
#include "train/pycocotools.h"

namespace syncbn::train {
namespace {

/// @param images in the order in which they are matched
AveragePrecision evaluate(const std::vector<BoxImage>& images, size_t classes) {
  std::vector<MatchedDetection> matched;
  std::vector<int64_t> counts(classes * kNumAreas);
  for (const BoxImage& image : images) {
    const auto own = match(image.id, image.truths, image.detections);
    matched.insert(matched.end(), own.begin(), own.end());
    count_truths(image.truths, counts);
  }
  return average_precision(std::move(matched), counts);
}

double figure(const AveragePrecision& result, const std::string& name) {
  return result
      .summary[static_cast<size_t>(std::ranges::find(kSummaryNames, name) - kSummaryNames.begin())];
}

// ---- by hand -----------------------------------------------------------------------------------

Truth square(double x, double side, bool is_crowd = false) {
  return {.box = {x, 0, side, side}, .area = side * side, .is_crowd = is_crowd};
}

Detection found(double x, double side, double score) {
  return {.score = score, .box = {x, 0, side, side}};
}

TEST(AveragePrecisionTest, AMissAHitAndAFalseAlarm) {
  // A detection of nothing is followed by one with IoU 1 with one of two truths: precision is 1/2
  // up to recall 1/2, at 51 of 101 points.
  const auto result = evaluate(
      {{1, {square(0, 40), square(100, 40)}, {found(200, 40, 0.9), found(0, 40, 0.8)}}}, 1);
  EXPECT_DOUBLE_EQ(figure(result, "map"), 0.5 * 51 / 101);
  EXPECT_DOUBLE_EQ(figure(result, "mar_1"), 0);
  EXPECT_DOUBLE_EQ(figure(result, "mar_10"), 0.5);
  EXPECT_TRUE(std::isnan(figure(result, "map_small")));
  EXPECT_DOUBLE_EQ(figure(result, "map_medium"), 0.5 * 51 / 101);
}

TEST(AveragePrecisionTest, MeanOfTheCurvesIsMap) {
  std::vector<MatchedDetection> matched;
  std::vector<int64_t> counts(2 * kNumAreas);  // the second class has no truths
  const std::vector<Truth> truths = {square(0, 40), square(100, 40)};
  for (const MatchedDetection& one :
       match(1, truths, std::vector{found(200, 40, 0.9), found(8, 40, 0.8), found(100, 40, 0.7)})) {
    matched.push_back(one);
  }
  count_truths(truths, counts);
  const PrecisionCurves curves = precision_curves(matched, counts);
  EXPECT_DOUBLE_EQ(curves[0][0], 2.0 / 3);
  EXPECT_DOUBLE_EQ(curves[9][50], 1.0 / 3) << "IoU 0.667 is too little there";
  EXPECT_DOUBLE_EQ(curves[9][51], 0);
  double sum = 0;
  for (const auto& curve : curves) sum += std::accumulate(curve.begin(), curve.end(), 0.0);
  EXPECT_DOUBLE_EQ(sum / (kNumThresholds * kNumRecalls),
                   figure(average_precision(matched, counts), "map"));
  EXPECT_TRUE(std::isnan(precision_curves({}, std::vector<int64_t>(kNumAreas))[0][0]));
}

TEST(AveragePrecisionTest, ThresholdsAreOfIou) {
  // IoU is (40 - 8) / (40 + 8) = 0.667: a match for 4 of 10 thresholds.
  const auto result = evaluate({{1, {square(0, 40)}, {found(8, 40, 0.9)}}}, 1);
  EXPECT_DOUBLE_EQ(figure(result, "map"), 0.4);
  EXPECT_DOUBLE_EQ(figure(result, "map_50"), 1);
  EXPECT_DOUBLE_EQ(figure(result, "map_75"), 0);
}

TEST(AveragePrecisionTest, DetectionsInACrowdCountForNothing) {
  const auto result = evaluate({{1,
                                 {square(0, 40), square(100, 200, /*is_crowd=*/true)},
                                 {found(120, 40, 0.9), found(140, 40, 0.8), found(0, 40, 0.7)}}},
                               1);
  EXPECT_DOUBLE_EQ(figure(result, "map"), 1);
}

TEST(AveragePrecisionTest, ATruthIsFoundOnce) {
  // The second detection of a truth is wrong, even after the right one: precision is 1 at each
  // recall. If it had the higher score, precision would be 1/2.
  const std::vector<Detection> twice = {found(0, 40, 0.9), found(1, 40, 0.8)};
  const auto result = evaluate({{1, {square(0, 40)}, twice}, {2, {square(0, 40)}, {}}}, 1);
  EXPECT_DOUBLE_EQ(figure(result, "map"), 1.0 * 51 / 101);
  EXPECT_DOUBLE_EQ(figure(result, "mar_100"), 0.5);
}

TEST(AveragePrecisionTest, ClassesWithoutTruthsAreLeftOut) {
  const auto result =
      evaluate({{1, {square(0, 40)}, {found(0, 40, 0.5), {1, 0.9, {0, 0, 9, 9}}}}}, 3);
  EXPECT_DOUBLE_EQ(figure(result, "map"), 1);
  ASSERT_EQ(result.classes.size(), 3U);
  EXPECT_DOUBLE_EQ(result.classes[0], 1);
  EXPECT_TRUE(std::isnan(result.classes[1]) && std::isnan(result.classes[2]));
}

// ---- beside pycocotools ------------------------------------------------------------------------

constexpr size_t kBoxClasses = 6;

/// Images with truths of all sizes, some of them crowds, and detections near some truths, with few
/// distinct scores. Class 4 has no truth, class 5 neither truth nor detection.
std::vector<BoxImage> random_images(uint32_t seed, int count) {
  std::mt19937 random(seed);
  const auto below = [&](uint32_t bound) { return static_cast<double>(random() % bound); };
  std::vector<BoxImage> images;
  for (int i = 0; i < count; ++i) {
    BoxImage image;
    image.id = 7 * (i + 1);
    const auto box = [&] {
      const double side = std::array{12.0, 60.0, 200.0}[random() % 3];
      return PixelBox{below(400) / 2, below(300) / 4, side + below(40) / 3, side + below(40) / 3};
    };
    for (auto left = static_cast<int>(below(9)); left > 0; --left) {
      const PixelBox own = box();
      image.truths.push_back({.label = static_cast<int64_t>(below(4)),
                              .box = own,
                              .area = own.width * own.height * (0.5 + below(50) / 100),
                              .is_crowd = below(8) == 0});
    }
    const int many = i % 10 == 0 ? 260 : static_cast<int>(below(30));
    for (int k = 0; k < many; ++k) {
      PixelBox own = box();
      auto label = static_cast<int64_t>(below(5));
      if (!image.truths.empty() && below(3) > 0) {
        const Truth& near = image.truths[random() % image.truths.size()];
        own = near.box;
        own.x += below(20) - 10;
        own.width += below(5);
        if (below(5) > 0) label = near.label;
      }
      // More than 100 detections of one class.
      if (many > 200 && k < 150) label = 2;
      image.detections.push_back({label, below(25) / 25, own});
    }
    images.push_back(image);
  }
  return images;
}

/// @param images in the order of their ids
void expect_figures_of_pycocotools(std::vector<BoxImage> images) {
  const std::vector<double> expected = figures_of_pycocotools(images, kBoxClasses);
  // Ranks would find them in another order.
  std::ranges::reverse(images);
  const AveragePrecision result = evaluate(images, kBoxClasses);
  std::vector<double> figures(result.summary.begin(), result.summary.end());
  figures.insert(figures.end(), result.classes.begin(), result.classes.end());
  ASSERT_EQ(figures.size(), expected.size());
  for (size_t i = 0; i < figures.size(); ++i) {
    EXPECT_NEAR(std::isnan(figures[i]) ? -1 : figures[i], expected[i], 1e-14) << i;
  }
}

TEST(AveragePrecisionPythonTest, FiguresAreThoseOfPycocotools) {
  SYNCBN_SKIP_UNLESS(test::python_has("pycocotools"), "pycocotools");
  for (const uint32_t seed : {1U, 2U, 3U}) expect_figures_of_pycocotools(random_images(seed, 80));
}

TEST(AveragePrecisionPythonTest, FiguresAreThoseOfPycocotoolsWithoutSmallTruths) {
  SYNCBN_SKIP_UNLESS(test::python_has("pycocotools"), "pycocotools");
  auto images = random_images(4, 40);
  for (BoxImage& image : images) {
    std::erase_if(image.truths, [](const Truth& truth) { return truth.area <= 32 * 32; });
  }
  expect_figures_of_pycocotools(images);
}

}  // namespace
}  // namespace syncbn::train
