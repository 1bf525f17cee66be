// Transforms of samples with boxes.
#include <syncbn/data/transforms.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/data/image_ops.h>

#include "data/components.h"
#include "data/images.h"
#include "data/jpeg_writer.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::data {
namespace {

using test::component;
using test::picture;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Options = test::ComponentOptions;

Pipeline box_pipeline(const std::string& type, const Options& options = {}) {
  return Pipeline(std::vector{component(type, options)}, /*has_boxes=*/true);
}

ImageSample with_boxes(int64_t width, int64_t height) {
  const auto w = static_cast<double>(width);
  const auto h = static_cast<double>(height);
  return {.image = picture(width, height),
          .boxes = {{0.1 * w, 0.2 * h, 0.5 * w, 0.9 * h, 3}, {0.25 * w, 0, w, 0.5 * h, 1}}};
}

ImageSample run(const Pipeline& steps, const ImageSample& sample, int64_t number) {
  SampleRandom random(0, 0, number);
  return steps.run(sample, random);
}

/// Applies torchvision's transforms, with options that make them deterministic, to images of raw
/// pixels (arguments: file, width and height of each). Prints the size, FNV-1a and boxes of each
/// result.
constexpr const char* kTorchvision = R"(
import sys, torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2
for i in range(1, len(sys.argv), 3):
    w, h = int(sys.argv[i + 1]), int(sys.argv[i + 2])
    image = Image.frombytes("RGB", (w, h), open(sys.argv[i], "rb").read())
    boxes = tv_tensors.BoundingBoxes(
        [[0.1 * w, 0.2 * h, 0.5 * w, 0.9 * h], [0.25 * w, 0, w, 0.5 * h]],
        format="XYXY", canvas_size=(h, w), dtype=torch.float64)
    for steps in (v2.RandomHorizontalFlip(p=1), v2.RandomVerticalFlip(p=1),
                  v2.Resize(20), v2.Resize(20, max_size=33), v2.Resize((17, 25)),
                  v2.RandomShortestSize([24, 24], 37), v2.RandomShortestSize([90, 90]),
                  v2.ScaleJitter((60, 45), (1.5, 1.5)), v2.CenterCrop((21, 18)), v2.CenterCrop(70)):
        out, moved = steps(image, boxes)
        fnv = 0xcbf29ce484222325
        for byte in out.tobytes():
            fnv = ((fnv ^ byte) * 0x100000001b3) & (2 ** 64 - 1)
        print(*out.size, f"{fnv:016x}", *(float(value) for value in moved.flatten()))
)";

TEST(DetectionTransformsTest, MoveBoxesAsTorchvisionDoes) {
  SYNCBN_SKIP_UNLESS(test::python_has("torchvision"), "torchvision");
  const std::vector<Pipeline> all = {
      box_pipeline("random_horizontal_flip", {{"p", "1"}}),
      box_pipeline("random_vertical_flip", {{"p", "1"}}),
      box_pipeline("resize", {{"size", "20"}}),
      box_pipeline("resize", {{"size", "20"}, {"max_size", "33"}}),
      box_pipeline("resize", {{"height", "17"}, {"width", "25"}}),
      box_pipeline("random_shortest_size", {{"min_size", "[24,24]"}, {"max_size", "37"}}),
      box_pipeline("random_shortest_size", {{"min_size", "[90,90]"}}),
      box_pipeline("scale_jitter", {{"target_size", "[60,45]"}, {"scale_range", "[1.5,1.5]"}}),
      box_pipeline("center_crop", {{"height", "21"}, {"width", "18"}}),
      box_pipeline("center_crop", {{"size", "70"}})};
  // Even numbers of missing pixels: with odd ones, torchvision's center_crop moves boxes by one
  // more than the pixels.
  const std::vector<std::pair<int64_t, int64_t>> sizes = {{40, 30}, {30, 64}, {71, 24}};
  const test::TempFolder folder;
  std::vector<std::string> command = {test::python(), "-c", kTorchvision};
  for (const auto& [width, height] : sizes) {
    const Image image = picture(width, height);
    command.push_back(folder.write(fmt::format("{}x{}", width, height),
                                   {image.pixels.begin(), image.pixels.end()}));
    command.insert(command.end(), {std::to_string(width), std::to_string(height)});
  }
  const auto result = test::run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::istringstream lines(result.out);
  for (const auto& [width, height] : sizes) {
    const ImageSample sample = with_boxes(width, height);
    for (size_t i = 0; i < all.size(); ++i) {
      std::string expected;
      std::getline(lines, expected);
      const ImageSample ours = run(all[i], sample, 0);
      const std::string hash = test::hash_of(ours.image);
      ASSERT_EQ(expected.substr(0, hash.size()), hash) << i << " of " << width << " x " << height;
      std::istringstream numbers(expected.substr(hash.size()));
      for (const LabelledBox& box : ours.boxes) {
        for (const double value : {box.x1, box.y1, box.x2, box.y2}) {
          double torchvisions = NAN;
          numbers >> torchvisions;
          // torchvision's resize ratios are float32.
          EXPECT_NEAR(value, torchvisions, 1e-4) << i << " of " << width << " x " << height;
        }
      }
      EXPECT_EQ(ours.boxes[0].label, 3);
    }
  }
}

TEST(DetectionTransformsTest, RandomCropsMoveAndClipBoxes) {
  const ImageSample sample = with_boxes(20, 16);
  const Pipeline steps =
      box_pipeline("random_crop", {{"height", "9"}, {"width", "11"}, {"padding", "3"}});
  const Image padded = pad(sample.image, 3, 3, 3, 3, 0);
  for (int64_t number = 0; number < 100; ++number) {
    const ImageSample out = run(steps, sample, number);
    bool is_found = false;
    for (int64_t top = 0; top <= 13 && !is_found; ++top) {
      for (int64_t left = 0; left <= 15 && !is_found; ++left) {
        if (crop(padded, {left, top, 11, 9}) != out.image) continue;
        is_found = true;
        for (size_t i = 0; i < 2; ++i) {
          const auto x = [&](double value) {
            return std::clamp(value + 3 - static_cast<double>(left), 0.0, 11.0);
          };
          const auto y = [&](double value) {
            return std::clamp(value + 3 - static_cast<double>(top), 0.0, 9.0);
          };
          const LabelledBox& box = sample.boxes[i];
          EXPECT_NEAR(out.boxes[i].x1, x(box.x1), 1e-12);
          EXPECT_NEAR(out.boxes[i].y1, y(box.y1), 1e-12);
          EXPECT_NEAR(out.boxes[i].x2, x(box.x2), 1e-12);
          EXPECT_NEAR(out.boxes[i].y2, y(box.y2), 1e-12);
        }
      }
    }
    EXPECT_TRUE(is_found) << number;
  }
}

TEST(DetectionTransformsTest, RandomShortestSizeDrawsEachLength) {
  std::set<int64_t> heights;
  for (int64_t number = 0; number < 100; ++number) {
    const Pipeline steps =
        box_pipeline("random_shortest_size", {{"min_size", "[12,18]"}, {"max_size", "50"}});
    heights.insert(run(steps, with_boxes(40, 30), number).image.height);
  }
  EXPECT_THAT(heights, ElementsAre(12, 18));
}

TEST(DetectionTransformsTest, ScaleJitterDrawsItsScale) {
  const Pipeline steps = box_pipeline("scale_jitter", {{"target_size", "[80,80]"}});
  int64_t least = 1000, most = 0;
  double sum = 0;
  for (int64_t number = 0; number < 400; ++number) {
    const ImageSample out = run(steps, with_boxes(40, 20), number);
    least = std::min(least, out.image.width);
    most = std::max(most, out.image.width);
    sum += static_cast<double>(out.image.width);
    EXPECT_NEAR(static_cast<double>(out.image.height), static_cast<double>(out.image.width) / 2, 1);
  }
  EXPECT_LT(least, 14);  // at least 0.1 * 80
  EXPECT_GT(most, 150);  // at most 2 * 80
  EXPECT_NEAR(sum / 400, 1.05 * 80, 8);
}

/// All possible results of random_photometric_distort if its factors are fixed.
std::vector<Image> distorted(const Image& image) {
  std::vector<Image> all;
  for (const bool contrast_before : {true, false}) {
    Image changed = image;
    adjust_brightness(changed, 1.1);
    if (contrast_before) adjust_contrast(changed, 0.6);
    adjust_saturation(changed, 1.3);
    adjust_hue(changed, 0.04);
    if (!contrast_before) adjust_contrast(changed, 0.6);
    std::array<size_t, 3> order = {0, 1, 2};
    do {
      Image permuted = changed;
      for (size_t i = 0; i < permuted.pixels.size(); ++i) {
        permuted.pixels[i] = changed.pixels[i / 3 * 3 + order[i % 3]];
      }
      all.push_back(permuted);
    } while (std::ranges::next_permutation(order).found);
  }
  return all;
}

TEST(DetectionTransformsTest, RandomPhotometricDistortAppliesTorchvisionsOperations) {
  const ImageSample sample = with_boxes(20, 20);
  Options options = {{"brightness", "[1.1,1.1]"},
                     {"contrast", "[0.6,0.6]"},
                     {"saturation", "[1.3,1.3]"},
                     {"hue", "[0.04,0.04]"}};
  options.emplace_back("p", "1");
  const std::vector<Image> expected = distorted(sample.image);
  std::vector<int> counts(expected.size());
  for (int64_t number = 0; number < 1200; ++number) {
    const ImageSample out =
        run(box_pipeline("random_photometric_distort", options), sample, number);
    EXPECT_EQ(out.boxes, sample.boxes);
    const auto found = std::ranges::find(expected, out.image);
    ASSERT_NE(found, expected.end()) << number;
    ++counts[static_cast<size_t>(found - expected.begin())];
  }
  for (const int count : counts) EXPECT_NEAR(count, 100, 40);
  options.back().second = "0";
  EXPECT_EQ(run(box_pipeline("random_photometric_distort", options), sample, 0).image,
            sample.image);
}

TEST(DetectionTransformsTest, RandomZoomOutPutsTheImageIntoALargerOne) {
  const ImageSample sample = with_boxes(20, 10);
  const Pipeline steps = box_pipeline("random_zoom_out", {{"fill", "9"}});
  int64_t widest = 0;
  int unchanged = 0;
  for (int64_t number = 0; number < 400; ++number) {
    const ImageSample out = run(steps, sample, number);
    if (out.image == sample.image) {
      ++unchanged;
      continue;
    }
    widest = std::max(widest, out.image.width);
    const double dx = out.boxes[0].x1 - sample.boxes[0].x1;
    const double dy = out.boxes[0].y1 - sample.boxes[0].y1;
    const auto left = static_cast<int64_t>(std::round(dx));
    const auto top = static_cast<int64_t>(std::round(dy));
    EXPECT_EQ(out.image, pad(sample.image, left, top, out.image.width - 20 - left,
                             out.image.height - 10 - top, 9));
    EXPECT_NEAR(out.boxes[1].x2 - sample.boxes[1].x2, dx, 1e-9);
    EXPECT_NEAR(out.boxes[1].y2 - sample.boxes[1].y2, dy, 1e-9);
  }
  EXPECT_NEAR(unchanged, 200, 50);
  EXPECT_TRUE(widest > 72 && widest <= 80) << widest;
}

TEST(DetectionTransformsTest, RandomIouCropKeepsBoxesWhoseMiddleIsInside) {
  const ImageSample sample = with_boxes(60, 40);
  int whole = 0, without_a_box = 0;
  for (int64_t number = 0; number < 400; ++number) {
    const ImageSample out = run(box_pipeline("random_iou_crop"), sample, number);
    if (out.image == sample.image) {
      EXPECT_EQ(out.boxes, sample.boxes);
      ++whole;
      continue;
    }
    ASSERT_FALSE(out.boxes.empty());
    const double ratio =
        static_cast<double>(out.image.width) / static_cast<double>(out.image.height);
    EXPECT_TRUE(ratio >= 0.5 && ratio <= 2) << ratio;
    EXPECT_TRUE(out.image.width >= 18 && out.image.height >= 12);
    without_a_box += out.boxes.size() == 1 ? 1 : 0;
    for (const LabelledBox& box : out.boxes) {
      EXPECT_TRUE(box.x1 >= 0 && box.x2 <= static_cast<double>(out.image.width));
      EXPECT_TRUE(box.y1 >= 0 && box.y2 <= static_cast<double>(out.image.height));
      EXPECT_TRUE(box.x1 < box.x2 && box.y1 < box.y2);
    }
  }
  EXPECT_GT(whole, 400 / 7 - 25);  // one of seven overlaps keeps the whole image
  EXPECT_GT(without_a_box, 20);
  // With an overlap of 0.9, only crops around a box remain.
  const Pipeline tight = box_pipeline("random_iou_crop", {{"sampler_options", "[0.9,1]"},
                                                          {"min_aspect_ratio", "0.1"},
                                                          {"max_aspect_ratio", "9"},
                                                          {"trials", "100000"}});
  for (int64_t number = 0; number < 20; ++number) {
    const ImageSample out = run(tight, sample, number);
    if (out.image == sample.image) continue;
    const auto share = [&](const LabelledBox& box) {
      return (box.x2 - box.x1) * (box.y2 - box.y1) /
             static_cast<double>(out.image.width * out.image.height);
    };
    EXPECT_TRUE(std::ranges::any_of(out.boxes, [&](const auto& box) { return share(box) >= 0.9; }));
  }
  const ImageSample empty{.image = picture(60, 40)};
  EXPECT_EQ(run(box_pipeline("random_iou_crop"), empty, 1).image, empty.image);
}

TEST(DetectionTransformsTest, OptionsAreChecked) {
  const auto refusal = [](const std::string& type, const Options& options, const char* why) {
    EXPECT_THAT([&] { component(type, options); }, ThrowsMessage<base::UserError>(HasSubstr(why)))
        << type;
  };
  refusal("random_shortest_size", {}, "min_size");
  refusal("random_shortest_size", {{"min_size", "[0,4]"}}, "at least 1");
  refusal("scale_jitter", {{"target_size", "[4,4]"}, {"scale_range", "[2,1]"}}, "in this order");
  refusal("random_photometric_distort", {{"hue", "[-0.6,0]"}}, "at least -0.5");
  for (const char* range : {"brightness", "contrast", "saturation", "hue"}) {
    refusal("random_photometric_distort", {{range, "[0.5,0.4]"}}, "in this order");
  }
  refusal("random_zoom_out", {{"side_range", "[3,2]"}}, "side_range has a smallest");
  refusal("random_zoom_out", {{"side_range", "[0.5,1]"}}, "at least 1");
  refusal("random_iou_crop", {{"sampler_options", "[0.5,0.9]"}}, "needs a 1");
  refusal("random_iou_crop", {{"min_scale", "0.9"}, {"max_scale", "0.8"}}, "not be above");
}

TEST(DetectionTransformsTest, BoundTheSizeOfResults) {
  const auto largest = [](const std::string& type, const Options& options,
                          std::optional<ImageSize> before = {}) {
    EXPECT_EQ(box_pipeline(type, options).size(before), std::nullopt) << type;
    return box_pipeline(type, options).max_size(before);
  };
  EXPECT_EQ(largest("random_shortest_size", {{"min_size", "[4,8]"}}, ImageSize{5, 5}),
            std::nullopt);
  EXPECT_EQ(largest("random_shortest_size", {{"min_size", "[4,8]"}, {"max_size", "9"}}),
            (ImageSize{9, 9}));
  EXPECT_EQ(largest("scale_jitter", {{"target_size", "[6,5]"}}), (ImageSize{12, 10}));
  EXPECT_EQ(largest("random_zoom_out", {}, ImageSize{6, 5}), (ImageSize{24, 20}));
  EXPECT_EQ(largest("random_zoom_out", {}), std::nullopt);
  EXPECT_EQ(largest("random_iou_crop", {}, ImageSize{6, 5}), (ImageSize{6, 5}));
}

}  // namespace
}  // namespace syncbn::data
