// Batches of images of different sizes.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <vector>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/data/batch_transforms.h>
#include <syncbn/data/image_sets.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/subset.h>

#include "data/components.h"
#include "data/images.h"
#include "data/jpeg_writer.h"
#include "support/temp_folder.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;
using test::component;
using test::picture;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Sample i has 10 + 20 i rows and 50 - 10 i columns with the value i + 1, also as pixel labels.
/// Sample 3 is damaged.
class Growing : public SampleDataset {
 public:
  int64_t size() const override { return 4; }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return 5; }
  std::vector<int64_t> sample_shape() const override { return {2, kHeight, kWidth}; }
  std::vector<int64_t> target_shape() const override { return {kHeight, kWidth}; }
  bool sizes_vary() const override { return true; }
  uint64_t fingerprint() const override { return 1; }

  void read_sample(int64_t index, SampleRandom&, const SampleSlot& slot) const override {
    if (index == 3) throw base::UserError("damaged");
    slot.size[0] = height_of(index);
    slot.size[1] = width_of(index);
    // Values outside of the image must not get into the batch.
    std::ranges::fill(slot.data, 99);
    std::ranges::fill(slot.target, 99);
    for (int64_t y = 0; y < height_of(index); ++y) {
      for (int64_t x = 0; x < width_of(index); ++x) {
        const auto at = static_cast<size_t>(y * kWidth + x);
        slot.data[at] = slot.data[kHeight * kWidth + at] = static_cast<uint8_t>(index + 1);
        slot.target[at] = index + 1;
      }
    }
  }

  static int64_t height_of(int64_t index) { return 10 + 20 * index; }
  static int64_t width_of(int64_t index) { return 50 - 10 * index; }

 private:
  static constexpr int64_t kHeight = 70;
  static constexpr int64_t kWidth = 50;
};

/// The expected batch of these samples of Growing.
Batch expected(const std::vector<int64_t>& indices, int64_t height, int64_t width) {
  const auto size = std::ssize(indices);
  Batch batch{at::zeros({size, 2, height, width}, at::kByte),
              at::full({size, height, width}, 255, at::kLong), at::empty({size, 2}, at::kLong)};
  for (int64_t i = 0; i < size; ++i) {
    const int64_t index = indices[static_cast<size_t>(i)];
    const int64_t rows = Growing::height_of(index), columns = Growing::width_of(index);
    batch.data[i].slice(1, 0, rows).slice(2, 0, columns).fill_(index + 1);
    batch.target[i].slice(0, 0, rows).slice(1, 0, columns).fill_(index + 1);
    batch.sizes[i].copy_(at::tensor({rows, columns}, at::kLong));
  }
  return batch;
}

void expect_equal(const Batch& batch, const Batch& wanted) {
  EXPECT_TRUE(at::equal(batch.data, wanted.data)) << batch.data.sizes();
  EXPECT_TRUE(at::equal(batch.target, wanted.target)) << batch.target.sizes();
  EXPECT_TRUE(at::equal(batch.sizes, wanted.sizes)) << batch.sizes;
}

TEST(ImageSizesTest, ABatchIsAsLargeAsItsLargestImageRoundedUpTo32) {
  const auto set = std::make_shared<const Growing>();
  expect_equal(set->get_batch(std::vector<int64_t>{0, 1}), expected({0, 1}, 32, 50));
  expect_equal(set->get_batch(std::vector<int64_t>{2}), expected({2}, 64, 32));
  const auto some = subset(set, {2, 0});
  EXPECT_TRUE(some->sizes_vary());
  expect_equal(some->get_batch(std::vector<int64_t>{1, 0}), expected({0, 2}, 64, 50));
}

class ImageSizesLoaderTest : public ::testing::TestWithParam<int> {};

TEST_P(ImageSizesLoaderTest, TrimsBatchesAlsoWithoutDamagedSamples) {
  Loader loader(std::make_shared<const Growing>(), {.batch_size = 3,
                                                    .num_workers = GetParam(),
                                                    .on_error = LoaderOptions::OnError::kSkip,
                                                    .empty_batches = true,
                                                    .error_budget = 1});
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    loader.start_epoch(epoch);
    expect_equal(*loader.next(), expected({0, 1, 2}, 64, 50));
    const Batch damaged = *loader.next();
    EXPECT_EQ(damaged.data.sizes(), (std::vector<int64_t>{0, 2, 70, 50}));
    EXPECT_EQ(damaged.sizes.sizes(), (std::vector<int64_t>{0, 2}));
    EXPECT_FALSE(loader.next());
  }
  Loader pairs(subset(std::make_shared<const Growing>(), {1, 3, 0}),
               {.batch_size = 2,
                .num_workers = GetParam(),
                .on_error = LoaderOptions::OnError::kSkip,
                .error_budget = 1});
  pairs.start_epoch(0);
  expect_equal(*pairs.next(), expected({1}, 32, 50));
  expect_equal(*pairs.next(), expected({0}, 32, 50));
}

INSTANTIATE_TEST_SUITE_P(Workers, ImageSizesLoaderTest, ::testing::Values(0, 3));

TEST(ImageSizesTest, NormalizeLeavesZerosOutsideOfImages) {
  const Normalization normalization{{0.5, 0.25}, {0.5, 0.5}};
  const Batch batch = Growing().get_batch(std::vector<int64_t>{0, 2});
  const at::Tensor all = normalize(batch.data, normalization, batch.sizes);
  const at::Tensor plain = normalize(batch.data, normalization);
  for (const auto& [place, index] : {std::pair<int64_t, int64_t>{0, 0}, {1, 2}}) {
    const at::Tensor inside = at::zeros({64, 50}, at::kBool);
    inside.slice(0, 0, Growing::height_of(index)).slice(1, 0, Growing::width_of(index)).fill_(true);
    EXPECT_TRUE(at::equal(all[place], at::where(inside, plain[place], at::zeros({}))));
  }
}

class SegmentationSizesTest : public ::testing::Test {
 protected:
  SegmentationSizesTest() {
    fs::create_directory(folder_ / "images");
    fs::create_directory(folder_ / "masks");
    folder_.write("images/a.jpg", test::write_jpeg(picture(13, 11)));
    folder_.write("masks/a.png", base::read_file(test::kImages / "png_grey2.png"));
  }
  SegmentationFolderOptions options() const {
    SegmentationFolderOptions made;
    made.train_images = made.test_images = folder_ / "images";
    made.train_masks = made.test_masks = folder_ / "masks";
    made.cache_dir = folder_ / "cache";
    made.classes = 4;
    made.test_transforms = {component("resize", {{"size", "40"}, {"max_size", "100"}})};
    return made;
  }

  const test::TempFolder folder_;
};

TEST_F(SegmentationSizesTest, ImagesKeepTheirOwnSize) {
  const auto set = load_segmentation_folder(options(), Split::kTest);
  EXPECT_TRUE(set->sizes_vary());
  EXPECT_EQ(set->sample_shape(), (std::vector<int64_t>{3, 100, 100}));
  const Batch batch = set->get_batch(std::vector<int64_t>{0});
  EXPECT_TRUE(at::equal(batch.sizes, at::tensor({40, 47}, at::kLong).view({1, 2})));
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{1, 3, 64, 64}));
  EXPECT_TRUE(batch.data[0].slice(1, 0, 40).slice(2, 47).eq(0).all().item<bool>());
  const at::Tensor ignored = batch.target[0].eq(255);
  EXPECT_EQ(ignored.sum().item<int64_t>(), 64 * 64 - 40 * 47);
  EXPECT_FALSE(ignored.slice(0, 0, 40).slice(1, 0, 47).any().item<bool>());
}

TEST_F(SegmentationSizesTest, NeedABound) {
  SegmentationFolderOptions unbounded = options();
  unbounded.test_transforms = {component("resize", {{"size", "40"}})};
  EXPECT_THAT([&] { load_segmentation_folder(unbounded, Split::kTest); },
              ThrowsMessage<base::UserError>(AllOf(
                  HasSubstr("segmentation_folder: the test_transforms leave images of any size"),
                  HasSubstr("resize with max_size"))));
}

}  // namespace
}  // namespace syncbn::data
