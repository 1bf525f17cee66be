// Segmentation of images of shapes, with masks of the pixels that belong to them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/data/image.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "e2e/png.h"
#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kSide = 64;  // of images, in pixels
constexpr int kIgnored = 255;
// "VOC2012 Colour Map" of the development kit: background, aeroplane, bicycle, bird.
constexpr std::array<std::array<uint8_t, 3>, 4> kVocColors{
    {{0, 0, 0}, {128, 0, 0}, {0, 128, 0}, {128, 128, 0}}};

class SegmentationProgramTest : public ::testing::Test {
 protected:
  SegmentationProgramTest() {
    for (const auto& [split, images] : {std::pair{"train", 32}, {"test", 9}}) {
      for (const char* kind : {"images", "masks"}) {
        std::filesystem::create_directories(folder_ / fmt::format("{}/{}", split, kind));
      }
      for (int i = 0; i < images; ++i) add(split, i);
    }
    folder_.write("shapes.yaml", R"(
epochs: 6
batch_size: 4
seed: 1
sync_batchnorm: true
task: segmentation
model: lraspp_mobilenet_v3_large
data:
  type: segmentation_folder
  train_images: train/images
  train_masks: train/masks
  test_images: test/images
  test_masks: test/masks
  classes: 4
  class_names: [ground, disc, square, star]
  cache_dir: cache
  transforms: [random_horizontal_flip, {type: center_crop, size: 64}]
  test_transforms: [{type: center_crop, size: 64}]
optimizer: {type: adamw, lr: 0.003}
update_bn_stats: 4
)");
  }

  /// Adds a red disc and a blue square on noise, with unlabelled pixels around them; only the upper
  /// `rows` rows of the image.
  void add(const std::string& split, int index, int rows = kSide) const {
    std::mt19937 random(static_cast<uint32_t>(index) + (split == "test" ? 1000U : 0U));
    const auto below = [&](uint32_t bound) { return static_cast<int>(random() % bound); };
    const int disc_x = 12 + below(40), disc_y = 12 + below(12);
    const int square_x = 12 + below(40), square_y = 40 + below(12);
    const auto height = static_cast<uint32_t>(rows);
    std::string image, mask;
    for (int y = 0; y < rows; ++y) {
      for (int x = 0; x < kSide; ++x) {
        const double disc = std::hypot(x - disc_x, y - disc_y) - 11;
        const double square = std::max(std::abs(x - square_x), std::abs(y - square_y)) - 11;
        const int label = disc < 0 ? 1 : square < 0 ? 2 : 0;
        for (const int channel : {1, 0, 2}) {
          image += static_cast<char>(60 + below(60) + (channel == label ? 110 : 0));
        }
        const bool is_border = std::min(std::abs(disc), std::abs(square)) < 1;
        mask += static_cast<char>(is_border ? kIgnored : label);
      }
    }
    folder_.write(fmt::format("{}/images/{}.png", split, index), png(kSide, height, image));
    folder_.write(fmt::format("{}/masks/{}.png", split, index), png(kSide, height, mask));
  }

  ProgramResult train(int ranks, const Words& more) const {
    return launch_train(ranks, Words{"--config=shapes.yaml", "--run_dir=run"} + more,
                        folder_.path());
  }

  void expect_refused(const Words& more, const std::string& message) const {
    expect_mistake(train(2, more), message);
  }

  const TempFolder folder_;
};

// ctest runs each suite as one entry; this alias splits the file into two, which run in parallel.
using SegmentationRefusalTest = SegmentationProgramTest;

TEST_F(SegmentationProgramTest, LearnsAndEvaluatesTheSameOnAnyNumberOfRanks) {
  const auto trained = train(2, {});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  const std::string remark = "miou leaves out a class that no pixel has: star\n";
  EXPECT_EQ(count(trained.err, remark), 1) << trained.err;
  const auto result = result_of(folder_ / "run");
  // A network that predicts only the largest class reaches 0.26.
  EXPECT_GT(result["best_test_miou"], 0.6);
  EXPECT_GT(result["test_pixel_accuracy"], 0.8);
  EXPECT_GT(result["train_miou"], 0.6);
  // 8 steps per epoch. Each row of the picture has an image, its labels and the prediction.
  const auto picture = data::load_image(folder_ / "run/pictures/samples-000000000024.png");
  EXPECT_EQ(picture.width, 3 * kSide);
  EXPECT_EQ(picture.height, 4 * kSide);
  const auto worst = data::load_image(folder_ / "run/pictures/worst_samples-000000000024.png");
  EXPECT_EQ(worst.pixels.size(), picture.pixels.size());
  EXPECT_NE(worst.pixels, picture.pixels);

  std::vector<nlohmann::json> evaluations;
  std::vector<double> losses;
  for (const int ranks : {1, 2, 3}) {
    const auto evaluated = launch_train(ranks,
                                        {"eval", "--config=run/config.yaml", "--resume=run/best.pt",
                                         fmt::format("--tables=of{}", ranks)},
                                        folder_.path());
    ASSERT_EQ(evaluated.exit_code, 0) << evaluated.err;
    EXPECT_THAT(evaluated.err, AllOf(HasSubstr(remark), Not(HasSubstr("other data"))));
    EXPECT_EQ(base::read_file(folder_ / fmt::format("of{}/confusion.csv", ranks)),
              base::read_file(folder_ / "of1/confusion.csv"));
    // After the launcher's prefix.
    evaluations.push_back(nlohmann::json::parse(evaluated.out.substr(evaluated.out.find('{'))));
    EXPECT_TRUE(evaluations.back()["iou_star"].is_null());
    losses.push_back(evaluations.back()["loss"]);
    EXPECT_NEAR(losses.back(), losses.front(), 1e-5 * losses.front());
    evaluations.back().erase("loss");
    EXPECT_EQ(evaluations.back(), evaluations.front()) << ranks;
  }
  EXPECT_EQ(evaluations.front()["miou"], result["best_test_miou"]);
  EXPECT_EQ(evaluations.front()["samples"], 9);
  const auto other = launch_train(1,
                                  {"eval", "--config=run/config.yaml", "--data.classes=4",
                                   "--data.test_transforms=[{type: center_crop, size: 48}]"},
                                  folder_.path());
  EXPECT_EQ(count(other.err,
                  "best.pt was made with other data; this evaluation has "
                  "data.test_transforms"),
            1)
      << other.err;
}

TEST_F(SegmentationProgramTest, PredictsTheMasksThatItEvaluates) {
  ASSERT_EQ(
      train(2, {"--epochs=2", "--data.test_transforms=[{type: resize, height: 64, width: 64}]"})
          .exit_code,
      0);
  // The network gets the images at half the resolution; predictions have the images' own size.
  const Words halved = {"--data.test_transforms=[{type: resize, height: 32, width: 32}]",
                        "--batch_size=2", "--loader.drop_last"};
  const Words of_any_size = {"--data.test_transforms=[{type: resize, size: 48, max_size: 100}]"};
  for (const auto& [ranks, more] : {std::pair{1, Words{}}, {2, of_any_size}, {3, halved}}) {
    const std::string output = fmt::format("of{}", ranks);
    const Words args = {"predict", "test/images", "--config=run/config.yaml", "--output=" + output};
    const auto predicted = launch_train(ranks, args + more, folder_.path());
    ASSERT_EQ(predicted.exit_code, 0) << predicted.err;
    EXPECT_THAT(predicted.err, HasSubstr("9 images"));
  }
  const auto cropped = launch_train(2,
                                    {"predict", "test/images", "--config=run/config.yaml",
                                     "--data.test_transforms=[{type: center_crop, size: 32}]"},
                                    folder_.path());
  expect_mistake(cropped, "a mask shows its whole image; remove crops from it");
  const auto right_in = [&](const std::string& output, bool of_shapes = false) {
    int64_t right = 0;
    int64_t all = 0;
    for (int i = 0; i < 9; ++i) {
      const auto mask_of = [&](const std::string& file) {
        const std::string bytes = base::read_file(folder_ / file);
        return data::ImageDecoder({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                                  file)
            .decode_mask();
      };
      const auto mask = mask_of(fmt::format("test/masks/{}.png", i));
      const std::string file = fmt::format("{}/{}.png", output, i);
      const auto predicted = mask_of(file);
      EXPECT_EQ(predicted.pixels.size(), mask.pixels.size());
      const auto shown = data::load_image(folder_ / file).pixels;
      std::vector<uint8_t> colors;
      for (const uint8_t label : predicted.pixels) {
        colors.insert(colors.end(), kVocColors.at(label).begin(), kVocColors.at(label).end());
      }
      EXPECT_EQ(std::vector<uint8_t>(shown.begin(), shown.end()), colors) << file;
      for (size_t at = 0; at < mask.pixels.size(); ++at) {
        if (mask.pixels[at] == kIgnored || (of_shapes && mask.pixels[at] == 0)) continue;
        ++all;
        right += mask.pixels[at] == predicted.pixels[at] ? 1 : 0;
      }
    }
    return static_cast<double>(right) / static_cast<double>(all);
  };
  const auto evaluated = launch_train(1, {"eval", "--config=run/config.yaml"}, folder_.path());
  const auto json = nlohmann::json::parse(evaluated.out.substr(evaluated.out.find('{')));
  EXPECT_DOUBLE_EQ(right_in("of1"), json["pixel_accuracy"]);
  // Four fifths of the pixels are ground, so count only the others.
  const double base_share = right_in("of1", /*of_shapes=*/true);
  EXPECT_GT(base_share, 0.3);
  EXPECT_GT(right_in("of2", /*of_shapes=*/true), base_share / 2);
  EXPECT_GT(right_in("of3", /*of_shapes=*/true), base_share / 4);
}

TEST_F(SegmentationProgramTest, ImagesOfAnySizeAreEvaluatedTheSameForAnyBatchAndNumberOfRanks) {
  for (int i = 0; i < 9; ++i) {
    add("train", i, 20 + 4 * i);
    add("test", i, 20 + 5 * i);
  }
  const auto trained =
      train(2, {"--epochs=1", "--data.transforms=[{type: resize, size: 40, max_size: 80}]",
                "--data.test_transforms=[{type: resize, size: 48, max_size: 100}]"});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  std::vector<nlohmann::json> evaluations;
  for (const auto& [ranks, batch_size] : {std::pair{1, 1}, {1, 5}, {2, 3}}) {
    const auto evaluated = launch_train(
        ranks, {"eval", "--config=run/config.yaml", fmt::format("--batch_size={}", batch_size)},
        folder_.path());
    ASSERT_EQ(evaluated.exit_code, 0) << evaluated.err;
    evaluations.push_back(nlohmann::json::parse(evaluated.out.substr(evaluated.out.find('{'))));
    const double loss = evaluations.back()["loss"];
    // Ranks have different numbers of threads, and float32 sums differ with them.
    EXPECT_NEAR(loss, evaluations.front()["loss"], 1e-6 * loss);
    evaluations.back()["loss"] = evaluations.front()["loss"];
    EXPECT_EQ(evaluations.back(), evaluations.front()) << ranks << " ranks, batch " << batch_size;
  }
}

TEST_F(SegmentationRefusalTest, ATaskOrNetworkForOtherDataIsRefused) {
  expect_refused(
      {"--task=classification"},
      "task: classification needs one label for each image, and this data has a label for "
      "each pixel; set task to segmentation");
  expect_refused({"--model=resnet18"},
                 "model resnet18: it predicts one label for each image, and task segmentation "
                 "needs a label for "
                 "each pixel; choose a network such as deeplabv3_resnet50");
  expect_refused({"--data=digits"}, "task: segmentation needs a label for each pixel");
  expect_refused({"--data=synthetic", "--task=classification"},
                 "model lraspp_mobilenet_v3_large: it predicts a label for each pixel, and task "
                 "classification needs one label for each image");
  expect_refused({"--data.class_names=[a, b]"}, "class_names has 2 names, classes is 4");
  expect_refused({"--checkpoint.keep_best.metric=iou"}, "choose from miou, pixel_accuracy, iou_g");
}

}  // namespace
}  // namespace syncbn::test
