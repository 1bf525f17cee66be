#include <syncbn/data/sample_dataset.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bitset>
#include <chrono>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <syncbn/data/image_sets.h>
#include <syncbn/data/subset.h>

#include "data/components.h"
#include "data/images.h"
#include "data/noise.h"
#include "support/temp_folder.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;
using test::component;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr std::chrono::minutes kAllTheTime{1};
const std::vector<config::Component<TransformKind>> kResized = {
    component("resize", {{"height", "8"}, {"width", "8"}})};

/// Samples of which only the facts matter.
class Facts : public test::Noise {
 public:
  Facts(int64_t size, int64_t classes, std::function<SampleFacts(int64_t)> facts,
        int64_t ignored = 255)
      : Noise(size), classes_(classes), ignored_(ignored), facts_(std::move(facts)) {}
  int64_t num_classes() const override { return classes_; }
  int64_t ignore_index() const override { return ignored_; }
  SampleFacts facts(int64_t index) const override { return facts_(index); }

 private:
  int64_t classes_;
  int64_t ignored_;
  std::function<SampleFacts(int64_t)> facts_;
};

class SurveyTest : public ::testing::Test {
 protected:
  void copy(const std::string& image, const std::string& file) const {
    fs::create_directories((folder_ / file).parent_path());
    fs::copy_file(test::kImages / image, folder_ / file);
  }
  void fill(ImageFileOptions& options) const {
    options.cache_dir = folder_ / "cache";
    options.transforms = options.test_transforms = kResized;
  }
  ImageFolderOptions folders() const {
    ImageFolderOptions made;
    made.train = folder_ / "train";
    made.test = folder_ / "test";
    fill(made);
    return made;
  }
  SegmentationFolderOptions masks(int64_t classes) const {
    SegmentationFolderOptions made;
    made.train_images = made.test_images = folder_ / "images";
    made.train_masks = made.test_masks = folder_ / "masks";
    made.classes = classes;
    fill(made);
    return made;
  }
  /// A mask of these values, and an image for it.
  void add_mask(const std::string& name, std::vector<uint8_t> values) const {
    Image mask(std::ssize(values), 1, 1);
    mask.pixels = std::move(values);
    for (const char* folder : {"images", "masks"}) fs::create_directories(folder_ / folder);
    folder_.write(fmt::format("masks/{}.png", name), encode_png(mask));
    folder_.write(fmt::format("images/{}.png", name), encode_png(Image(mask.width, 1, 3)));
  }
  static std::vector<std::string> survey_of(const SegmentationFolderOptions& options,
                                            Split split = Split::kTrain) {
    return survey(*load_segmentation_folder(options, split), split, kAllTheTime);
  }

  const test::TempFolder folder_;
};

TEST_F(SurveyTest, CountsRotatedImagesUnlessTheyAreTurned) {
  copy("exif_3.jpg", "train/a/1.jpg");
  copy("exif_6_late.png", "train/a/2.png");
  copy("exif_1.jpg", "train/b/3.jpg");
  folder_.write("train/b/4.jpg", "damaged, which the loader reports");
  ImageFolderOptions options = folders();
  const auto lines = survey(*load_image_folder(options, Split::kTrain), Split::kTrain, kAllTheTime);
  EXPECT_THAT(lines,
              ElementsAre(AllOf(StartsWith("train: 2 of 3 images looked at are stored rotated"),
                                HasSubstr("data.exif_orientation=true"))));
  EXPECT_THAT(survey(*load_image_folder(options, Split::kTrain), Split::kTrain, kAllTheTime, "new"),
              ElementsAre(StartsWith("new: 2 of 3 images")));
  options.exif_orientation = true;
  EXPECT_THAT(survey(*load_image_folder(options, Split::kTrain), Split::kTrain, kAllTheTime),
              IsEmpty());
}

TEST_F(SurveyTest, SaysOnceThatValuesHaveSixteenBits) {
  copy("png_grey16.png", "train/a/1.png");
  copy("png_grey16_interlaced.png", "train/a/2.png");
  copy("png_rgb16.png", "train/a/3.png");
  copy("png_rgb8.png", "train/a/4.png");
  ImageFolderOptions options = folders();
  const auto lines = [&] {
    return survey(*load_image_folder(options, Split::kTrain), Split::kTrain, kAllTheTime);
  };
  EXPECT_THAT(lines(), ElementsAre(AllOf(StartsWith("train: 3 of 4 images have values of 16 bits"),
                                         HasSubstr("data.high_bits=scale keeps the upper 8 bits"),
                                         EndsWith("clamp makes values above 255 white"))));
  options.high_bits = "clamp";
  EXPECT_THAT(lines(), IsEmpty());
}

TEST_F(SurveyTest, SaysThatScaledValuesOfFewerBitsAreBlack) {
  for (const auto& [image, largest] :
       {std::pair("png_grey16_8bits.png", 0), {"png_grey16_12bits.png", 15}}) {
    copy(image, "train/a/1.png");
    ImageFolderOptions options = folders();
    const auto set = load_image_folder(options, Split::kTrain);
    EXPECT_EQ(dynamic_cast<const SampleDataset&>(*set).facts(0).largest_scaled, largest);
    EXPECT_THAT(
        survey(*set, Split::kTrain, kAllTheTime),
        ElementsAre(
            AllOf(HasSubstr(fmt::format("largest value seen is then {} of 255", largest)),
                  HasSubstr("almost black: if their values need 8 bits, set data.high_bits=clamp"),
                  EndsWith("multiply them by 64 or 16 and save the images again"))));
    fs::remove(folder_ / "train/a/1.png");
  }
}

TEST_F(SurveyTest, NamesClassesWithoutASample) {
  for (const char* name : {"train/a/1.png", "train/b/1.png", "train/b/2.png", "train/c/1.png"}) {
    copy("png_rgb8.png", name);
  }
  copy("png_rgb8.png", "test/b/1.png");
  const auto train = load_image_folder(folders(), Split::kTrain);
  EXPECT_THAT(survey(*train, Split::kTrain, kAllTheTime), IsEmpty());
  EXPECT_THAT(survey(*subset(train, {0, 2}), Split::kTrain, kAllTheTime),
              ElementsAre("train: no sample of class c"));
  EXPECT_THAT(survey(*load_image_folder(folders(), Split::kTest), Split::kTest, kAllTheTime),
              ElementsAre("test: no sample of class a, c"));
}

TEST_F(SurveyTest, NamesClassesWithoutAPixel) {
  add_mask("1", {0, 1, 255});
  add_mask("2", {0, 3});
  SegmentationFolderOptions options = masks(4);
  EXPECT_THAT(survey_of(options), ElementsAre("train: no pixel of class 2 in 2 masks"));
  options.class_names = {"ground", "cat", "dog", "eel"};
  EXPECT_THAT(survey_of(options), ElementsAre("train: no pixel of class dog in 2 masks"));
  options.mask_values = {0, 1, 3, 2};
  EXPECT_THAT(survey_of(options), ElementsAre("train: no pixel of class eel in 2 masks"));
}

TEST_F(SurveyTest, SaysWhatToSetForMasksOfTwoValues) {
  add_mask("1", {0, 255});
  add_mask("2", {255, 255});
  const auto lines = survey_of(masks(2));
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0], "train: no pixel of class 1 in 2 masks");
  EXPECT_THAT(lines[1], AllOf(HasSubstr("hold only 0 and 255, and 255 is ignored"),
                              HasSubstr("data.mask_values=[0,255]")));
  EXPECT_THAT(survey_of(masks(1)), ElementsAre(HasSubstr("hold only 0 and 255")));
  EXPECT_THAT(survey_of(masks(2), Split::kTest),
              ElementsAre(StartsWith("test: no pixel"), HasSubstr("hold only 0 and 255")));
  SegmentationFolderOptions told = masks(2);
  told.mask_values = {0, 255};
  EXPECT_THAT(survey_of(told), IsEmpty());
  const auto set = load_segmentation_folder(told, Split::kTrain);
  EXPECT_EQ(set->get_batch(std::vector<int64_t>{1}).target.min().item<int64_t>(), 1);
}

TEST_F(SurveyTest, SeesMasksOfTwoValuesBesideOthers) {
  add_mask("1", {0, 255});
  add_mask("2", {0, 1});  // such as a PNG of one bit
  EXPECT_THAT(survey_of(masks(2)),
              ElementsAre(StartsWith("train: the masks that have 255 hold only 0 and 255, and")));
  add_mask("3", {0, 1, 255});
  EXPECT_THAT(survey_of(masks(2)), IsEmpty());
}

TEST_F(SurveyTest, LooksAtEachSampleOnceSpreadEvenlyFromTheFirstOn) {
  for (const int64_t size : {1, 2, 3, 4, 6, 30, 1000, 1024, 30'030}) {
    std::vector<int64_t> seen;
    const Facts set(size, 1, [&](int64_t index) {
      seen.push_back(index);
      return SampleFacts();
    });
    survey(set, Split::kTrain, kAllTheTime);
    std::vector<int64_t> first(seen.begin(), seen.begin() + std::min<int64_t>(16, size));
    std::ranges::sort(first);
    first.push_back(size);
    for (size_t i = 1; i < first.size() && size > 1000; ++i) {
      EXPECT_LT(first[i] - first[i - 1], size / 8) << size;
    }
    std::ranges::sort(seen);
    ASSERT_EQ(std::ssize(seen), size);
    EXPECT_EQ(std::ranges::unique(seen).size(), 0) << size;
  }
}

TEST_F(SurveyTest, StopsWhenTheTimeIsUpAndSaysThatThereIsMore) {
  int64_t calls = 0;
  const Facts set(1000, 2, [&](int64_t) {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return SampleFacts{.orientation = 6, .labels = std::bitset<256>().set(0).set(255)};
  });
  const auto lines = survey(set, Split::kTrain, std::chrono::milliseconds(50));
  EXPECT_GT(calls, 0);
  EXPECT_LT(calls, 10);
  const std::string s = calls == 1 ? "" : "s";
  EXPECT_THAT(
      lines,
      ElementsAre(
          StartsWith(fmt::format("train: {0} of {0} image{1} looked at are stored", calls, s)),
          fmt::format("train: no pixel of class 1 in {} mask{} looked at", calls, s),
          StartsWith("train: the masks looked at hold only 0 and 255, and 255 is ignored")));
}

TEST_F(SurveyTest, EndsNoRunWhateverACustomDataSetDoes) {
  const Facts broken(3, 2, [](int64_t index) {
    if (index == 1) throw std::out_of_range("a mistake of the data set's");
    return SampleFacts{.largest_scaled = 200};
  });
  EXPECT_THAT(survey(broken, Split::kTrain, kAllTheTime),
              ElementsAre(StartsWith("train: 2 of 2 images looked at have values")));
  // Facts hold labels up to 255.
  for (const int64_t ignored : {-100, 300}) {
    const Facts large(
        1, 400, [](int64_t) { return SampleFacts{.labels = std::bitset<256>().set().reset(7)}; },
        ignored);
    EXPECT_THAT(survey(large, Split::kTrain, kAllTheTime),
                ElementsAre("train: no pixel of class 7 in 1 mask"));
  }
}

}  // namespace
}  // namespace syncbn::data
