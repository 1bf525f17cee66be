#include <syncbn/data/image_sets.h>

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/config/schema.h>
#include <syncbn/data/image_ops.h>
#include <syncbn/data/loader.h>
#include <syncbn/data/unlabelled_images.h>

#include "data/components.h"
#include "data/images.h"
#include "data/jpeg_writer.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;
using test::component;
using test::picture;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

const std::vector<config::Component<TransformKind>> kEightByEight = {
    component("resize", {{"height", "8"}, {"width", "8"}})};

auto refuses(const char* what, const char* why) {
  return ThrowsMessage<base::UserError>(AllOf(HasSubstr(what), HasSubstr(why)));
}

Batch all_of(const Dataset& dataset) {
  std::vector<int64_t> numbers(static_cast<size_t>(dataset.size()));
  std::iota(numbers.begin(), numbers.end(), 0);
  return dataset.get_batch(numbers);
}

std::vector<int64_t> targets_of(const Batch& batch) {
  const auto* first = batch.target.const_data_ptr<int64_t>();
  return {first, first + batch.target.numel()};
}

/// An image as a tensor [C, H, W].
at::Tensor tensor_of(const Image& image) {
  return at::tensor(at::ArrayRef<uint8_t>(image.pixels), at::kByte)
      .view({image.height, image.width, image.channels})
      .permute({2, 0, 1});
}

// MNIST.

std::string u32(uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
  return bytes;
}

std::string idx(const std::vector<uint32_t>& sizes, const std::string& values) {
  std::string bytes = u32(0x0800 + static_cast<uint32_t>(sizes.size()));
  for (const uint32_t size : sizes) bytes += u32(size);
  return bytes + values;
}

class MnistTest : public ::testing::Test {
 protected:
  void write(const std::string& images, const std::string& labels) const {
    folder_.write("train-images-idx3-ubyte", images);
    folder_.write("train-labels-idx1-ubyte", labels);
  }
  std::shared_ptr<const Dataset> load(Split split = Split::kTrain) const {
    MnistOptions options;
    options.path = folder_.path().string();
    return load_mnist(options, split);
  }

  const test::TempFolder folder_;
};

TEST_F(MnistTest, ReadsImagesAndLabels) {
  write(idx({3, 2, 2}, "abcdefghijkl"), idx({3}, std::string("\7\0\3", 3)));
  const auto set = load();
  EXPECT_THAT(set->labels(), ElementsAre(7, 0, 3));
  EXPECT_EQ(set->num_classes(), 10);
  EXPECT_EQ(set->sample_shape(), (std::vector<int64_t>{1, 2, 2}));
  const Batch batch = set->get_batch(std::vector<int64_t>{2, 0});
  EXPECT_EQ(batch.data.scalar_type(), at::kByte);
  EXPECT_TRUE(batch.data[0].flatten().equal(at::tensor({'i', 'j', 'k', 'l'}, at::kByte)));
  EXPECT_THAT(targets_of(batch), ElementsAre(3, 7));
  EXPECT_THAT(set->normalization().mean, ElementsAre(0.1307));
}

TEST_F(MnistTest, ReadsGzippedFilesOfTheTestSplit) {
  for (const auto& [name, bytes] : {std::pair{"t10k-images-idx3-ubyte", idx({1, 1, 2}, "xy")},
                                    {"t10k-labels-idx1-ubyte", idx({1}, "\5")}}) {
    ASSERT_EQ(test::run_program({"gzip", folder_.write(name, bytes)}).exit_code, 0);
  }
  const auto set = load(Split::kTest);
  EXPECT_THAT(set->labels(), ElementsAre(5));
  EXPECT_EQ(set->sample_shape(), (std::vector<int64_t>{1, 1, 2}));
}

TEST_F(MnistTest, RefusesFilesThatContradictTheirHeaders) {
  const std::string labels = idx({2}, "\1\2");
  const std::string images = idx({2, 1, 1}, "ab");
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "No such file"));
  write("", labels);
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "it is empty"));
  write("ab", labels);
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "not an idx file"));
  write("<html>", labels);
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "it is HTML"));
  write(idx({2}, "ab"), labels);
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "3 dimensions"));
  write(idx({2, 1, 1}, "a"), labels);
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "shorter than its header"));
  write(idx({2, 1, 1}, "abc"), labels);
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "not what its header says"));
  write(idx({0xffffffff, 0xffffffff, 0xffffffff}, "ab"), labels);
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "shorter than its header"));
  write(idx({0, 0xffffffff, 0xffffffff}, ""), idx({0}, ""));
  EXPECT_THAT([&] { load(); }, refuses("train-images-idx3-ubyte", "it has no pixels"));
  write(images, idx({1}, "\1"));
  EXPECT_THAT([&] { load(); }, refuses("train-labels-idx1-ubyte", "1 label, "));
  write(images, idx({2}, "\1\12"));
  EXPECT_THAT([&] { load(); }, refuses("train-labels-idx1-ubyte", "sample 1 has the label 10"));
}

// CIFAR.

std::string cifar_record(const std::string& labels, const std::string& rgb) {
  std::string record = labels;
  for (const char value : rgb) record += std::string(1024, value);
  return record;
}

TEST(CifarTest, ReadsTheTrainingFilesInOrder) {
  const test::TempFolder folder;
  for (int file = 1; file <= 5; ++file) {
    folder.write(fmt::format("data_batch_{}.bin", file),
                 cifar_record(std::string(1, static_cast<char>(file)), "abc"));
  }
  CifarOptions options;
  options.path = folder.path().string();
  const auto set = load_cifar10(options, Split::kTrain);
  EXPECT_THAT(set->labels(), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(set->sample_shape(), (std::vector<int64_t>{3, 32, 32}));
  const Batch batch = set->get_batch(std::vector<int64_t>{3});
  for (int64_t c = 0; c < 3; ++c) {
    EXPECT_TRUE(batch.data[0][c].eq('a' + c).all().item<bool>());
  }
}

TEST(CifarTest, ReadsTheFineLabelsOfCifar100) {
  const test::TempFolder folder;
  folder.write("test.bin", cifar_record("\1\x63", "abc") + cifar_record("\1\x02", "abc"));
  CifarOptions options;
  options.path = folder.path().string();
  EXPECT_THAT(load_cifar100(options, Split::kTest)->labels(), ElementsAre(99, 2));
  folder.write("test.bin", cifar_record("\1\x64", "abc"));
  EXPECT_THAT([&] { load_cifar100(options, Split::kTest); }, refuses("test.bin", "label 100"));
  folder.write("test.bin", "");
  EXPECT_THAT([&] { load_cifar100(options, Split::kTest); }, refuses("test.bin", "it is empty"));
  folder.write("test.bin", "abc");
  EXPECT_THAT([&] { load_cifar100(options, Split::kTest); }, refuses("test.bin", "3 bytes"));
  folder.write("test.bin", "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT([&] { load_cifar100(options, Split::kTest); }, refuses("test.bin", "git lfs pull"));
}

TEST(CifarTest, IsAugmentedDifferentlyInEachEpoch) {
  const test::TempFolder folder;
  std::string record = "\3";
  for (int i = 0; i < 3072; ++i) record += static_cast<char>(i * 7 % 251);
  folder.write("test_batch.bin", record);
  CifarOptions options;
  options.path = folder.path().string();
  options.test_transforms = {component("random_crop", {{"size", "32"}, {"padding", "4"}})};
  const auto set = load_cifar10(options, Split::kTest);
  const auto& samples = dynamic_cast<const SampleDataset&>(*set);
  const auto sample_of = [&](int64_t epoch) {
    const Batch batch = samples.allocate(1);
    SampleRandom random(0, epoch, 0);
    samples.read_sample(0, random, SampleDataset::slot_of(batch, 0));
    return batch.data;
  };
  EXPECT_TRUE(sample_of(1).equal(sample_of(1)));
  EXPECT_FALSE(sample_of(1).equal(sample_of(2)));
}

// CSV.

TEST(CsvImagesTest, ReadsOneImagePerLine) {
  const test::TempFolder folder;
  CsvImagesOptions options;
  options.path = folder.write("a.csv", "0,255,7,8,9,10,2\n1,2,3,4,5,6,0\n1,1,1,1,1,1,2\n");
  options.height = 2;
  options.width = 3;
  options.classes = 3;
  options.test_fraction = 0.5;
  const auto set = load_csv_images(options, Split::kTrain);
  EXPECT_THAT(set->labels(), ElementsAre(2, 0));
  EXPECT_THAT(load_csv_images(options, Split::kTest)->labels(), ElementsAre(2));
  EXPECT_TRUE(all_of(*set).data[0].flatten().equal(at::tensor({0, 255, 7, 8, 9, 10}, at::kByte)));
  options.path = folder.write("b.csv", "0,256,7,8,9,10,2\n");
  EXPECT_THAT([&] { load_csv_images(options, Split::kTrain); },
              refuses("b.csv:1: column 2", "256"));
}

// Image folders.

class ImageFolderTest : public ::testing::Test {
 protected:
  void add(const std::string& file, const std::string& bytes) const {
    fs::create_directories((folder_ / file).parent_path());
    folder_.write(file, bytes);
  }
  ImageFolderOptions options() const {
    ImageFolderOptions made;
    made.train = folder_ / "train";
    made.test = folder_ / "test";
    made.cache_dir = folder_ / "cache";
    made.transforms = made.test_transforms = kEightByEight;
    return made;
  }
  std::vector<std::string> names(const Dataset& set) const {
    std::vector<std::string> all;
    for (int64_t i = 0; i < set.size(); ++i) {
      const fs::path name = dynamic_cast<const SampleDataset&>(set).name_of(i);
      all.push_back(name.lexically_relative(folder_.path()).string());
    }
    return all;
  }

  const test::TempFolder folder_;
};

constexpr const char* kWalkScript = R"(
import os, sys
root = sys.argv[1]
for name in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()):
    for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
        for file in sorted(files):
            if file.lower().endswith((".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")):
                print(os.path.relpath(os.path.join(folder, file), os.path.dirname(root)))
)";

TEST_F(ImageFolderTest, HasTheOrderOfTorchvision) {
  for (const char* file : {"b/2.jpg", "b/10.jpg", "b/1.JPEG", "b/x.png.txt", "b/deep/1.jpg",
                           "b/deep-er/0.Png", "b/deep/a/z.webp", "a/z.tiff", "a/Z.bmp", "A/0.ppm",
                           "A/notes.txt", "a b/1.pgm", "\xc3\xa9/1.tif", "stray.jpg"}) {
    add(std::string("train/") + file, "");
  }
  fs::create_directory_symlink(folder_ / "train/b/deep", folder_ / "train/a/link");
  const auto set = load_image_folder(options(), Split::kTrain);
  EXPECT_EQ(set->num_classes(), 5);
  EXPECT_THAT(set->labels(), ElementsAre(0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 4));
  const auto result = test::run_program({test::python(), "-c", kWalkScript, folder_ / "train"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::string ours;
  for (const std::string& name : names(*set)) ours += name + "\n";
  EXPECT_EQ(ours, result.out);
}

TEST_F(ImageFolderTest, DecodesAndTransformsFiles) {
  const std::string jpeg = test::write_jpeg(picture(30, 20));
  add("train/cat/a.jpg", jpeg);
  add("train/dog/b.JPEG", base::read_file(test::kImages / "png_rgb8.png"));
  const auto set = load_image_folder(options(), Split::kTrain);
  const Batch batch = all_of(*set);
  EXPECT_THAT(targets_of(batch), ElementsAre(0, 1));
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{2, 3, 8, 8}));
  EXPECT_TRUE(batch.data[0].equal(
      tensor_of(resize(ImageDecoder(test::bytes_of(jpeg), "a").decode(), 8, 8))));
  EXPECT_TRUE(
      batch.data[1].equal(tensor_of(resize(load_image(test::kImages / "png_rgb8.png"), 8, 8))));
}

TEST_F(ImageFolderTest, NamesTheFileThatIsDamaged) {
  add("train/cat/bad.jpg", "no image");
  const auto set = load_image_folder(options(), Split::kTrain);
  EXPECT_THAT([&] { all_of(*set); }, refuses("cat/bad.jpg", "neither JPEG nor PNG"));
  fs::remove(folder_ / "train/cat/bad.jpg");
  EXPECT_THAT([&] { all_of(*set); }, refuses("cat/bad.jpg", "No such file"));
  fs::create_symlink("nowhere", folder_ / "train/cat/bad.jpg");
  EXPECT_THAT([&] { all_of(*set); },
              refuses("cat/bad.jpg", "it is a link to 'nowhere', which does not exist"));
}

TEST_F(ImageFolderTest, RefusesFoldersWithoutClassesOrImages) {
  EXPECT_THAT([&] { load_image_folder(options(), Split::kTrain); },
              refuses("train", "No such file"));
  add("train/stray.jpg", "");
  EXPECT_THAT([&] { load_image_folder(options(), Split::kTrain); }, refuses("train", "no folders"));
  add("train/cat/a.jpg", "");
  fs::create_directory(folder_ / "train/empty");
  EXPECT_THAT([&] { load_image_folder(options(), Split::kTrain); },
              refuses("train", "no images in empty"));
  add("train/empty/a.jpg", "");
  add("test/cat/a.jpg", "");
  EXPECT_THAT(load_image_folder(options(), Split::kTest)->class_names(),
              ElementsAre("cat", "empty"));
  for (const char* name : {"a", "b", "c", "d", "e", "f"})
    add(fmt::format("test/{}/1.jpg", name), "");
  EXPECT_THAT([&] { load_image_folder(options(), Split::kTest); },
              refuses("/test' has class folders that '", "'a', 'b', 'c', 'd', 'e', and 1 more"));
}

TEST_F(ImageFolderTest, ExplainsClassesThatDifferOnlyInHowTheyAreWritten) {
  add("train/caf\xc3\xa9/1.jpg", "");  // one character, as Linux and Windows write it
  add("train/Dog house/1.jpg", "");
  const auto refusal = [&](const std::string& name, const std::string& text) {
    add(fmt::format("test/{}/1.jpg", name), "");
    EXPECT_THAT([&] { load_image_folder(options(), Split::kTest); },
                refuses("/test' has class folders that '", text.c_str()));
    fs::remove_all(folder_ / "test");
  };
  refusal("cafe\xcc\x81", "(cafe\\xcc\\x81); rename or remove them");
  refusal("cafe\xcc\x81", "(only the latter has 'Dog house', 'caf\xc3\xa9' (caf\\xc3\\xa9); ");
  refusal("dog house ", "'dog house '; rename");
  refusal("dog house ", "names that look alike differ in case, spaces or Unicode normalisation)");
  for (const char* name : {"caf\xc3\xa9", "Dog house"}) add(fmt::format("test/{}/1.jpg", name), "");
  refusal("eel", "lacks: 'eel'; rename or remove them (names that look alike");
}

TEST_F(ImageFolderTest, RequiresTransformsWithOneResultSize) {
  add("train/cat/a.jpg", "");
  ImageFolderOptions open = options();
  open.transforms = {component("resize", {{"size", "8"}})};
  EXPECT_THAT([&] { load_image_folder(open, Split::kTrain); },
              refuses("image_folder: the transforms", "random_resized_crop"));
  open.transforms = {component("center_crop", {{"size", "8001"}})};
  EXPECT_THAT([&] { load_image_folder(open, Split::kTrain); },
              refuses("image_folder: the transforms make images of up to 8001 x 8001 pixels",
                      "more than max_pixels, 64000000"));
  open.transforms = kEightByEight;
  open.mean = {0.5, 0.5};
  EXPECT_THAT([&] { load_image_folder(open, Split::kTrain); }, refuses("mean has 2", "3 channels"));
}

TEST_F(ImageFolderTest, AThinFileThatAResizeMakesHugeIsADamagedOne) {
  add("train/cat/good.png", encode_png(Image(300, 300, 3)));
  add("train/cat/tall.png", encode_png(Image(1, 60'000, 3)));
  ImageFolderOptions resized = options();
  resized.transforms = {component("resize", {{"size", "256"}}),
                        component("center_crop", {{"size", "8"}})};
  const auto set = load_image_folder(resized, Split::kTrain);
  LoaderOptions loading{.batch_size = 2, .on_error = LoaderOptions::OnError::kSkip};
  loading.error_budget = 1;
  Loader skipping(set, loading);
  skipping.start_epoch(0);
  EXPECT_THAT(skipping.next()->indices, ElementsAre(0));
  loading.on_error = LoaderOptions::OnError::kRaise;
  Loader raising(set, loading);
  raising.start_epoch(0);
  EXPECT_THAT([&] { raising.next(); },
              refuses("train/cat/tall.png): a transform of 1 x 60000 pixels",
                      "256 x 15360000 pixels, more than max_pixels, 64000000"));
}

TEST_F(ImageFolderTest, LooksForFilesThatItCannotUseOnceWhenItIsLoaded) {
  add("train/cat/a.jpg", "x");
  add("train/cat/b.jpg", "");
  add("train/c.jpg", "x");
  add("train/d.heic", "x");
  const auto set = load_image_folder(options(), Split::kTrain);
  add("train/cat/b.jpg", "x");
  ASSERT_EQ(set->remarks().size(), 2U);
  EXPECT_THAT(set->remarks()[0].text,
              HasSubstr("/train': left out: 2 files (1 .heic, 1 .jpg), such as 'c.jpg': not in a "
                        "class folder, neither JPEG nor PNG, or a link to nothing"));
  EXPECT_THAT(set->remarks()[1].text, HasSubstr("1 file (empty)"));
  EXPECT_EQ(load_image_folder(options(), Split::kTrain)->remarks().size(), 1U);
}

TEST_F(ImageFolderTest, FingerprintDependsOnTheFolder) {
  add("train/cat/a.jpg", "");
  const uint64_t before = load_image_folder(options(), Split::kTrain)->fingerprint();
  EXPECT_EQ(load_image_folder(options(), Split::kTrain)->fingerprint(), before);
  add("train/cat/b.jpg", "");
  EXPECT_NE(load_image_folder(options(), Split::kTrain)->fingerprint(), before);
}

// Segmentation.

class SegmentationFolderTest : public ::testing::Test {
 protected:
  SegmentationFolderTest() {
    fs::create_directory(folder_ / "images");
    fs::create_directory(folder_ / "masks");
  }
  SegmentationFolderOptions options(int64_t classes) const {
    SegmentationFolderOptions made;
    made.train_images = folder_ / "images";
    made.train_masks = folder_ / "masks";
    made.cache_dir = folder_ / "cache";
    made.classes = classes;
    made.transforms = {component("random_horizontal_flip", {{"p", "1"}}),
                       component("center_crop", {{"size", "7"}})};
    return made;
  }
  void add(const std::string& name, const Image& image, const char* mask) const {
    folder_.write("images/" + name + ".jpg", test::write_jpeg(image));
    folder_.write("masks/" + name + ".png", base::read_file(test::kImages / mask));
  }

  const test::TempFolder folder_;
};

TEST_F(SegmentationFolderTest, ReturnsImagesWithTheirMasks) {
  add("b", picture(13, 11), "png_grey2.png");
  add("a", picture(13, 11), "png_palette2.png");
  const auto set = load_segmentation_folder(options(4), Split::kTrain);
  EXPECT_TRUE(set->labels().empty());
  const Batch batch = all_of(*set);
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{2, 3, 7, 7}));
  EXPECT_EQ(batch.target.sizes(), (std::vector<int64_t>{2, 7, 7}));
  const std::string file = base::read_file(test::kImages / "png_grey2.png");
  Image mask = ImageDecoder(test::bytes_of(file), "a").decode_mask();
  flip_horizontally(mask);
  EXPECT_TRUE(batch.target[1].equal(tensor_of(crop(mask, {3, 2, 7, 7}))[0].to(at::kLong)));
}

TEST_F(SegmentationFolderTest, RefusesLabelsAboveTheClasses) {
  add("a", picture(13, 11), "png_grey2.png");
  const auto set = load_segmentation_folder(options(3), Split::kTrain);
  EXPECT_THAT([&] { all_of(*set); },
              refuses("masks/a.png", "the label 3; labels are below 3, or 255 for ignored pixels"));
  SegmentationFolderOptions ignoring = options(3);
  ignoring.ignore_index = 3;
  EXPECT_EQ(all_of(*load_segmentation_folder(ignoring, Split::kTrain)).target.max().item<int>(), 3);
}

TEST_F(SegmentationFolderTest, TakesOtherValuesForTheClassesIfToldWhich) {
  add("a", picture(13, 11), "png_grey2.png");  // 0 to 3
  const auto labels = [&](std::vector<int64_t> values, int64_t ignored) {
    SegmentationFolderOptions told = options(std::ssize(values));
    told.mask_values = std::move(values);
    told.ignore_index = ignored;
    const at::Tensor all = all_of(*load_segmentation_folder(told, Split::kTrain)).target;
    std::vector<int64_t> found;
    for (const int64_t label : {0, 1, 2, 3, 255}) {
      if (all.eq(label).any().item<bool>()) found.push_back(label);
    }
    return found;
  };
  EXPECT_THAT(labels({3, 2, 1, 0}, 255), ElementsAre(0, 1, 2, 3));
  // The labels begin with 0, so the value that is ignored needs another one.
  EXPECT_THAT(labels({1, 2, 3}, 0), ElementsAre(0, 1, 2, 255));
  EXPECT_THAT(
      [&] {
        labels({0, 3}, 255);
      },
      refuses("masks/a.png' has the labels 1, 2; data.mask_values has 0, 3, or 255 for ignored",
              "list the value of each class in data.mask_values"));
  // If white is a class, greys are those of 8 bits.
  EXPECT_THAT(labels({0, 85, 170, 255}, 255), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(
      [&] {
        labels({0, 255}, 255);
      },
      refuses("has the labels 85, 170; data.mask_values has 0, 255; list the value",
              "the values of a palette PNG are indices, whatever its colours"));
  add("a", picture(13, 11), "png_grey1.png");
  EXPECT_THAT(labels({0, 255}, 255), ElementsAre(0, 1));
  EXPECT_THAT(labels({0, 1}, 255), ElementsAre(0, 1));
  EXPECT_THAT(labels({0, 1, 255}, 255), ElementsAre(0, 1)) << "1 is a class";
  add("a", picture(13, 11), "png_palette1.png");
  EXPECT_THAT(
      [&] {
        labels({0, 255}, 255);
      },
      refuses("has the label 1; data.mask_values has 0, 255; list", "a palette PNG"));
  add("a", picture(13, 11), "png_grey2.png");
  SegmentationFolderOptions told = options(4);
  told.mask_values = {3, 2, 1, 0};
  const at::Tensor turned = all_of(*load_segmentation_folder(told, Split::kTrain)).target;
  EXPECT_TRUE(
      turned.equal(3 - all_of(*load_segmentation_folder(options(4), Split::kTrain)).target));
}

TEST_F(SegmentationFolderTest, AnIgnoredValueIsNoClass) {
  const auto faults = [](const char* ignored) {
    const auto scalar = [](const char* text) { return config::Value::of_scalar(text); };
    config::Value given = config::Value::of_map();
    given.set("train_images", config::Value::of_text("a"));
    given.set("train_masks", config::Value::of_text("b"));
    given.set("classes", scalar("2"));
    config::Value values;
    values.kind = config::Value::Kind::kList;
    values.list = {scalar("0"), scalar("255")};
    given.set("mask_values", values);
    given.set("ignore_index", scalar(ignored));
    SegmentationFolderOptions read;
    config::Faults found;
    config::Schema<SegmentationFolderOptions>::get().read(given, read, "", found);
    return found.messages();
  };
  EXPECT_THAT(faults("0"), ElementsAre(HasSubstr("ignore_index is one of mask_values")));
  EXPECT_THAT(faults("128"), ElementsAre());
  EXPECT_THAT(faults("255"), ElementsAre()) << "the default, which is no choice";
}

TEST_F(SegmentationFolderTest, NamesTheOrientationOfAnImageThatDoesNotFitItsMask) {
  folder_.write("images/a.jpg", base::read_file(test::kImages / "exif_6.jpg"));  // 21 x 13
  folder_.write("masks/a.png", encode_png(Image(13, 21, 1)));
  SegmentationFolderOptions turned = options(4);
  EXPECT_THAT([&] { all_of(*load_segmentation_folder(turned, Split::kTrain)); },
              refuses("13 x 21 pixels, its image 21 x 13",
                      "(EXIF orientation 6): set data.exif_orientation=true"));
  turned.exif_orientation = true;
  EXPECT_EQ(all_of(*load_segmentation_folder(turned, Split::kTrain)).size(), 1);
  folder_.write("masks/a.png", encode_png(Image(21, 13, 1)));  // drawn on the stored picture
  EXPECT_THAT([&] { all_of(*load_segmentation_folder(turned, Split::kTrain)); },
              refuses("21 x 13 pixels, its image 13 x 21",
                      "(EXIF orientation 6): set data.exif_orientation=false"));
  turned.exif_orientation = false;
  EXPECT_EQ(all_of(*load_segmentation_folder(turned, Split::kTrain)).size(), 1);
  folder_.write("masks/a.png", encode_png(Image(13, 13, 1)));  // the option does not help
  for (const bool option : {false, true}) {
    turned.exif_orientation = option;
    EXPECT_THAT([&] { all_of(*load_segmentation_folder(turned, Split::kTrain)); },
                ThrowsMessage<base::UserError>(
                    AllOf(HasSubstr("13 x 13 pixels, its image"), Not(HasSubstr("EXIF")))));
  }
}

TEST_F(SegmentationFolderTest, RefusesPairsThatDoNotMatch) {
  EXPECT_THAT([&] { load_segmentation_folder(options(4), Split::kTrain); },
              refuses("images", "no images"));
  add("a", picture(13, 12), "png_grey2.png");
  EXPECT_THAT([&] { all_of(*load_segmentation_folder(options(4), Split::kTrain)); },
              refuses("masks/a.png", "13 x 11"));
  fs::remove(folder_ / "masks/a.png");
  EXPECT_THAT([&] { load_segmentation_folder(options(4), Split::kTrain); },
              refuses("no mask in '", "/images': a.jpg; add the masks"));
}

// A small PASCAL VOC with the folders of VOCtrainval_11-May-2012.tar.
class VocSegmentationTest : public ::testing::Test {
 protected:
  VocSegmentationTest() {
    for (const char* below : {"JPEGImages", "SegmentationClass", "ImageSets/Segmentation"}) {
      fs::create_directories(folder_ / kVoc / below);
    }
    // Not sorted: the order of the list counts.
    write("ImageSets/Segmentation/train.txt", "2008_000002\n2007_000032\n");
    write("ImageSets/Segmentation/val.txt", "2007_000033");
    add("2007_000032", "png_palette2.png");
    add("2007_000033", "png_grey2.png");
    add("2008_000002", "png_palette4.png");
    add("2009_000001", "png_palette2.png");  // on neither list
    options_.root = folder_.path();
    options_.test_transforms = options_.transforms = {component("center_crop", {{"size", "7"}})};
  }

  void write(const std::string& file, const std::string& bytes) const {
    folder_.write(fmt::format("{}/{}", kVoc, file), bytes);
  }
  void add(const std::string& name, const char* mask) const {
    write(fmt::format("JPEGImages/{}.jpg", name), test::write_jpeg(picture(13, 11)));
    write(fmt::format("SegmentationClass/{}.png", name), base::read_file(test::kImages / mask));
  }

  static constexpr const char* kVoc = "VOCdevkit/VOC2012";
  const test::TempFolder folder_;
  VocSegmentationOptions options_;
};

TEST_F(VocSegmentationTest, EqualsTorchvision) {
  SYNCBN_SKIP_UNLESS(test::python_has("torchvision"), "python-torchvision");
  const auto set = load_voc_segmentation(options_, Split::kTrain);
  EXPECT_EQ(set->num_classes(), 21);
  EXPECT_EQ(set->class_names()[15], "person");
  const Batch batch = all_of(*set);
  ASSERT_EQ(batch.data.sizes(), (std::vector<int64_t>{2, 3, 7, 7}));
  std::string ours;
  for (const at::Tensor& values : {batch.data, batch.target}) {
    const at::Tensor flat = values.to(at::kLong).flatten();
    for (int64_t i = 0; i < flat.numel(); ++i) ours += fmt::format("{} ", flat[i].item<int64_t>());
  }
  const auto torchvision = test::run_program({test::python(), "-c", R"(
import sys
import numpy
from torchvision.datasets import VOCSegmentation
from torchvision.transforms.functional import center_crop
pairs = [[center_crop(picture, 7) for picture in pair]
         for pair in VOCSegmentation(sys.argv[1], "2012", "train")]
images = [numpy.asarray(image.convert("RGB")).transpose(2, 0, 1) for image, _ in pairs]
masks = [numpy.asarray(mask) for _, mask in pairs]
for values in images + masks:
    for value in values.flatten():
        print(value, end=" ")
)",
                                              folder_.path()});
  ASSERT_EQ(torchvision.exit_code, 0) << torchvision.err;
  EXPECT_EQ(ours, torchvision.out);
}

TEST_F(VocSegmentationTest, ReadsTheListsThatTheOptionsName) {
  EXPECT_EQ(load_voc_segmentation(options_, Split::kVal)->size(), 1);
  EXPECT_EQ(load_voc_segmentation(options_, Split::kTest), nullptr);
  options_.train = "trainval";
  EXPECT_THAT([&] { load_voc_segmentation(options_, Split::kTrain); },
              refuses("Segmentation/trainval.txt", "root is the folder that contains VOCdevkit"));
  write("ImageSets/Segmentation/trainval.txt", "2008_000002\r\n2007_000032\n2007_000033\n");
  const auto both = load_voc_segmentation(options_, Split::kTrain);
  EXPECT_EQ(both->size(), 3);
  EXPECT_NE(both->fingerprint(), load_voc_segmentation(options_, Split::kVal)->fingerprint());
  write("ImageSets/Segmentation/trainval.txt", " \n");
  EXPECT_THAT([&] { load_voc_segmentation(options_, Split::kTrain); },
              refuses("trainval.txt", "no names"));
  options_.year = 2011;
  EXPECT_THAT([&] { load_voc_segmentation(options_, Split::kVal); },
              refuses("TrainVal/VOCdevkit/VOC2011/", "No such file"));
}

TEST_F(VocSegmentationTest, NamesWhatIsMissing) {
  fs::remove(folder_ / kVoc / "SegmentationClass/2007_000032.png");
  EXPECT_THAT([&] { load_voc_segmentation(options_, Split::kTrain); },
              refuses("VOC2012' for 1 of 4 photos and masks of the list 'train': "
                      "SegmentationClass/2007_000032.png; ",
                      "remove their names from the list"));
  fs::create_symlink("nowhere", folder_ / kVoc / "SegmentationClass/2007_000032.png");
  EXPECT_THAT([&] { load_voc_segmentation(options_, Split::kTrain); },
              refuses("2007_000032.png (it is a link to 'nowhere'", "which does not exist)"));
  fs::remove(folder_ / kVoc / "SegmentationClass/2007_000032.png");
  const fs::path photo = folder_ / kVoc / "JPEGImages/2007_000032.jpg";
  fs::rename(photo, folder_ / "kept.jpg");
  EXPECT_THAT([&] { load_voc_segmentation(options_, Split::kTrain); },
              refuses(" for 2 of 4 photos and masks",
                      ": JPEGImages/2007_000032.jpg, SegmentationClass/2007_000032.png; "));
  fs::rename(folder_ / "kept.jpg", photo);
  add("2007_000032", "png_palette8.png");  // its labels exceed VOC's
  EXPECT_THAT([&] { all_of(*load_voc_segmentation(options_, Split::kTrain)); },
              refuses("SegmentationClass/2007_000032.png", "labels are below 21"));
  for (const char* name : {"../../../precious", "/precious"}) {
    write("ImageSets/Segmentation/train.txt", name);
    EXPECT_THAT([&] { load_voc_segmentation(options_, Split::kTrain); },
                refuses(name, "on the list 'train', leads out of"));
  }
}

TEST(UnlabelledImagesTest, AreAllFilesOfAFolderThatCanBeDecoded) {
  const test::TempFolder folder;
  fs::create_directories(folder / "b/c");
  fs::copy_file(test::kImages / "exif_6.jpg", folder / "b/c/turned.JPG");
  folder.write("b/0.png", base::read_file(test::kImages / "png_grey8.png"));
  folder.write("a.jpg", test::write_jpeg(picture(13, 11)));
  folder.write("a.txt", "no image");
  folder.write("c.jfif", test::write_jpeg(picture(13, 11)));
  folder.write("d.gif", "GIF89a and so on");
  folder.write("e.webp", "RIFF and so on");
  folder.write(".hidden.png", base::read_file(test::kImages / "png_grey8.png"));
  folder.write(".ipynb_checkpoints/a.jpg", "a copy");
  UnlabelledImagesOptions options;
  options.images = folder.path();
  options.test_transforms = kEightByEight;
  options.exif_orientation = true;
  const UnlabelledImages images = load_unlabelled_images(options);
  EXPECT_THAT(images.files, ElementsAre("a.jpg", "b/0.png", "b/c/turned.JPG", "c.jfif"));
  EXPECT_EQ(images.others, "2 files (1 .gif, 1 .webp), such as 'd.gif'");
  EXPECT_EQ(images.num_others, 2);
  EXPECT_TRUE(images.are_whole);
  EXPECT_EQ(all_of(*images.set).data.sizes(), (std::vector<int64_t>{4, 3, 8, 8}));
  EXPECT_EQ(images.original_size(0), (ImageSize{.width = 13, .height = 11}));
  options.exif_orientation = false;
  const ImageSize stored = load_unlabelled_images(options).original_size(2);
  EXPECT_NE(stored.width, stored.height);
  EXPECT_EQ(images.original_size(2), (ImageSize{.width = stored.height, .height = stored.width}));
}

TEST(UnlabelledImagesTest, RefuseALinkToAFolderThatContainsIt) {
  const test::TempFolder folder;
  fs::create_directories(folder / "b/c");
  folder.write("b/c/0.png", base::read_file(test::kImages / "png_grey8.png"));
  fs::create_directory_symlink("..", folder / "b/c/up");
  UnlabelledImagesOptions options;
  options.images = folder.path();
  options.test_transforms = kEightByEight;
  EXPECT_THAT([&] { load_unlabelled_images(options); }, refuses("b/c/up", "remove the link"));
  fs::remove(folder / "b/c/up");
  fs::create_directory_symlink("c", folder / "b/copy");
  EXPECT_THAT(load_unlabelled_images(options).files, ElementsAre("b/c/0.png", "b/copy/0.png"));
}

TEST(UnlabelledImagesTest, RefuseALinkThatCannotBeFollowed) {
  const test::TempFolder folder;
  folder.write("0.png", base::read_file(test::kImages / "png_grey8.png"));
  fs::create_symlink("nowhere", folder / "missing");
  UnlabelledImagesOptions options;
  options.images = folder.path();
  options.test_transforms = kEightByEight;
  EXPECT_THAT(load_unlabelled_images(options).files, ElementsAre("0.png"));
  fs::create_symlink(std::string(300, 'x'), folder / "more");
  EXPECT_THAT([&] { load_unlabelled_images(options); }, refuses("/more'", "File name too long"));
  fs::remove(folder / "more");
  // An image that is missing is not left out silently.
  fs::create_symlink("nowhere", folder / "1.png");
  const UnlabelledImages images = load_unlabelled_images(options);
  EXPECT_THAT(images.files, ElementsAre("0.png", "1.png"));
  EXPECT_THAT([&] { all_of(*images.set); }, refuses("1.png", "it is a link to 'nowhere'"));
  options.images = folder / "missing";
  EXPECT_THAT([&] { load_unlabelled_images(options); },
              refuses("/missing': it is a link to 'nowhere'", "which does not exist"));
}

}  // namespace
}  // namespace syncbn::data
