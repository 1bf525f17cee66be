// Each configuration in configs/ and of docs/results.md, on small stand-ins for its data, in the
// same formats.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "e2e/png.h"
#include "e2e/train_program.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kStandInSide = 48;  // of image files, in pixels
constexpr int kStandInImages = 8;

// Small images and batches, and the stand-ins' folders.
const Words kImagenet = {
    "--data.train=train",     "--data.val=val",
    "--global_batch_size=4",  "--data.transforms.0.size=32",
    "--data.test_transforms", "[{type: resize, size: 32}, {type: center_crop, size: 32}]"};
const Words kCoco = {"--data.train_annotations=train.json",
                     "--data.train_images=train/a",
                     "--data.val_annotations=val.json",
                     "--data.val_images=val/a",
                     "--data.transforms.1.size=64",
                     "--data.test_transforms.0.size=64",
                     "--batch_size=1"};

using Recipes = std::map<std::string, Words>;

const Recipes kRecipes = {
    {"cifar10_resnet18", {"--data.path=cifar", "--global_batch_size=4"}},
    {"dcgan", {"--data.train=train", "--batch_size=2", "--val_fraction=0.25"}},
    {"detection", kCoco},
    {"digits", {}},
    {"digits-local-bn", {}},
    {"images", {"--data.train=train", "--data.test=val", "--batch_size=2", "--val_fraction=0.25"}},
    {"imagenet", kImagenet},
    {"mnist", {"--data.path=mnist", "--batch_size=4"}},
    {"stamps/detection", {"--data.transforms.1.size=32"}},
    {"stamps/gan", {"--task.samples=4", "--val_fraction=0.25"}},
    {"stamps/segmentation", {"--data.transforms.1.size=32", "--data.test_transforms.0.size=32"}},
};
// Their networks are large.
const Recipes kLargeRecipes = {
    {"coco_fcos", kCoco},
    {"coco_retinanet", kCoco},
    {"imagenet_resnet50", kImagenet},
    {"imagenet_resnet50_v2", kImagenet + Words{"--sampler.selected_round=0"}},
    {"voc_deeplabv3",
     {"--data.root=voc", "--batch_size=2", "--data.transforms.2.size=64",
      "--data.test_transforms.0.size=64", "--data.test_transforms.0.max_size=80"}},
};

/// The configurations of docs/results.md are next to the programs that create their data.
std::string file_of(const std::string& recipe) {
  return recipe.starts_with("stamps/") ? SYNCBN_SOURCE_DIR "/examples/" + recipe + ".yaml"
                                       : shipped_config(recipe + ".yaml");
}

/// Bytes of noise.
std::string noise(size_t size, uint32_t below = 256) {
  static std::mt19937 random(1);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random() % below);
  return bytes;
}

std::string big_endian(uint32_t value) {
  std::string bytes;
  for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift);
  return bytes;
}

class RecipesTest : public ::testing::TestWithParam<Recipes::value_type> {
 protected:
  void write(const std::string& file, const std::string& bytes) const {
    base::write_file_atomically(folder_ / file, bytes);
  }

  /// Writes folders of two classes, and a box for each image of the first one.
  void write_images(const std::string& split) const {
    const int first = split == "val" ? 100 : 0;
    nlohmann::json file = {{"categories", {{{"id", 1}, {"name", "thing"}}}}};
    for (int i = 0; i < kStandInImages; ++i) {
      const std::string name = fmt::format("{}.png", i);
      for (const char* label : {"a", "b"}) {
        write(fmt::format("{}/{}/{}", split, label, name),
              png(kStandInSide, kStandInSide, noise(3 * kStandInSide * kStandInSide)));
      }
      file["images"].push_back({{"id", first + i},
                                {"file_name", name},
                                {"width", kStandInSide},
                                {"height", kStandInSide}});
      file["annotations"].push_back({{"id", i + 1},
                                     {"image_id", first + i},
                                     {"category_id", 1},
                                     {"bbox", {4, 4, 30, 30}},
                                     {"area", 900},
                                     {"iscrowd", 0}});
    }
    write(split + ".json", file.dump());
  }

  void write_cifar() const {
    const auto records = [](int count) {
      std::string bytes;
      for (int i = 0; i < count; ++i) bytes += noise(1, 10) + noise(3 * 32 * 32);
      return bytes;
    };
    for (int i = 1; i <= 5; ++i) write(fmt::format("cifar/data_batch_{}.bin", i), records(4));
    write("cifar/test_batch.bin", records(4));
  }

  void write_mnist() const {
    constexpr uint32_t kImageMagic = 0x803, kLabelMagic = 0x801, kCount = 16, kWidth = 28;
    for (const char* split : {"train", "t10k"}) {
      write(fmt::format("mnist/{}-images-idx3-ubyte", split),
            big_endian(kImageMagic) + big_endian(kCount) + big_endian(kWidth) + big_endian(kWidth) +
                noise(kCount * kWidth * kWidth));
      write(fmt::format("mnist/{}-labels-idx1-ubyte", split),
            big_endian(kLabelMagic) + big_endian(kCount) + noise(kCount, 10));
    }
  }

  void write_voc() const {
    const std::string year = "voc/VOCdevkit/VOC2012/";
    std::map<std::string, std::string> lists;
    for (int i = 0; i < kStandInImages; ++i) {
      const std::string name = fmt::format("2007_{:06}", i);
      lists[i % 2 == 0 ? "train" : "val"] += name + "\n";
      write(year + "JPEGImages/" + name + ".jpg",
            png(kStandInSide, kStandInSide, noise(3 * kStandInSide * kStandInSide)));
      write(year + "SegmentationClass/" + name + ".png",
            png(kStandInSide, kStandInSide, noise(kStandInSide * kStandInSide, 21)));
    }
    for (const auto& [list, names] : lists) {
      write(fmt::format("{}ImageSets/Segmentation/{}.txt", year, list), names);
    }
  }

  /// Writes files like those of examples/stamps/make_data.py.
  void write_stamps() const {
    for (const std::string split : {"train", "val"}) {
      const std::string folder = "scenes/" + split;
      for (int i = 0; i < kStandInImages; ++i) {
        const std::string name = fmt::format("/{}.png", i);
        fs::create_directories(folder_ / (folder + "/images"));
        fs::copy_file(folder_ / (split + "/a" + name), folder_ / (folder + "/images" + name));
        write(folder + "/masks" + name,
              png(kStandInSide, kStandInSide, noise(kStandInSide * kStandInSide, 2)));
      }
      fs::copy_file(folder_ / (split + ".json"), folder_ / (folder + ".json"));
    }
    fs::create_directories(folder_ / "gan");
    fs::copy(folder_ / "train/a", folder_ / "gan/all");
  }

  TempFolder folder_;
};

TEST_P(RecipesTest, TakesStepsAndEvaluates) {
  const auto& [recipe, more] = GetParam();
  write_images("train");
  write_images("val");
  write_cifar();
  write_mnist();
  write_voc();
  write_stamps();
  const Words args = {"--config", file_of(recipe), "--run_dir=run", "--max_steps=2"};
  const auto result =
      start_launched_train(2, args + more, {{"STAMPS", folder_.path()}}, folder_.path())->wait();
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string log = base::read_file(folder_ / "run/log.jsonl");
  EXPECT_THAT(log, HasSubstr("\"reason\":\"finished\",\"step\":2"));
  EXPECT_THAT(log, ContainsRegex("\"event\":\"epoch\".*\"(val|test)_"));
}

std::string name_of(const ::testing::TestParamInfo<Recipes::value_type>& info) {
  std::string name = info.param.first;
  std::ranges::replace_if(
      name, [](char c) { return c == '-' || c == '/'; }, '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Configs, RecipesTest, ::testing::ValuesIn(kRecipes), name_of);
INSTANTIATE_TEST_SUITE_P(Exhaustive, RecipesTest, ::testing::ValuesIn(kLargeRecipes), name_of);

TEST(ConfigurationsTest, AreValidAndHaveAStandIn) {
  std::set<std::string> tried;
  for (const Recipes& recipes : {kRecipes, kLargeRecipes}) {
    for (const auto& [recipe, more] : recipes) {
      tried.insert(recipe);
      const auto printed =
          run_train({"--config", file_of(recipe), "--print_config"}, {{"STAMPS", "stamps"}});
      EXPECT_EQ(printed.exit_code, 0) << recipe << "\n" << printed.err;
    }
  }
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(fs::path(shipped_config("")))) {
    names.insert(entry.path().stem());
  }
  for (const auto& entry : fs::directory_iterator(SYNCBN_SOURCE_DIR "/examples/stamps")) {
    if (entry.path().extension() == ".yaml") names.insert("stamps/" + entry.path().stem().string());
  }
  EXPECT_EQ(tried, names);
}

}  // namespace
}  // namespace syncbn::test
