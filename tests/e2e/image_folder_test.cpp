// Training on image files, from a configuration.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include <filesystem>
#include <string>

#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

using ::testing::HasSubstr;

constexpr int kImages = 8;  // of each class and split

class ImageFolderTrainingTest : public ::testing::Test {
 protected:
  ImageFolderTrainingTest() {
    for (const char* split : {"train", "test"}) {
      // Some of colours, some grey: two classes that are easily told apart.
      fill(split, "colour", "jpeg_444.jpg");
      fill(split, "grey", "png_grey8.png");
    }
    base::write_file_atomically(folder_ / "images.yaml", R"(
epochs: 2
batch_size: 4
model: {type: digits, width: 4}
sync_batchnorm: true
data:
  type: image_folder
  train: train
  test: test
  cache_dir: cache
  transforms:
    - {type: random_resized_crop, size: 8}
    - {type: random_horizontal_flip}
  test_transforms:
    - {type: resize, size: 8}
    - {type: center_crop, size: 8}
optimizer: {type: sgd, lr: 0.05}
)");
  }

  ProgramResult train(const std::string& run_dir) const {
    return launch_train(2, {"--config", "images.yaml", "--run_dir", run_dir}, folder_.path());
  }

  TempFolder folder_;

 private:
  void fill(const std::string& split, const std::string& label, const std::string& image) const {
    const std::filesystem::path source =
        std::filesystem::path(SYNCBN_SOURCE_DIR) / "tests/data/images" / image;
    const std::filesystem::path target = std::filesystem::path(folder_.path()) / split / label;
    std::filesystem::create_directories(target);
    for (int i = 0; i < kImages; ++i) {
      const std::string name = fmt::format("{}{}", i, source.extension().string());
      std::filesystem::copy_file(source, target / name);
    }
  }
};

TEST_F(ImageFolderTrainingTest, LearnsFromFilesTheSameEveryTime) {
  for (const char* run : {"first", "second"}) {
    const auto result = train(run);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("16 training and 16 test samples"));
  }
  const auto first = result_of(folder_ / "first");
  EXPECT_EQ(first["epochs"], 2);
  EXPECT_EQ(first["train_loss"], result_of(folder_ / "second")["train_loss"]);
}

TEST_F(ImageFolderTrainingTest, AFileThatIsNoImageIsNamed) {
  base::write_file_atomically(folder_ / "train/grey/none.png", "no image");
  const auto result = train("run");
  EXPECT_EQ(result.exit_code, base::kExitUsage);
  EXPECT_THAT(result.err, HasSubstr("none.png': it is neither JPEG nor PNG"));
}

}  // namespace
}  // namespace syncbn::test
