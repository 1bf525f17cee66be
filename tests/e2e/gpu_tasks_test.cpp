// Tasks and commands of `train` give the same on a GPU as on the CPU: ctest -L gpu, or on fake CUDA
// devices ctest -L fakegpu. gpu_training_test.cpp trains the digits over NCCL.
#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/gpus.h>
#include <syncbn/data/image.h>
#include <syncbn/models/weights.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "e2e/png.h"
#include "e2e/train_program.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr int kSide = 64;    // of images, in pixels
constexpr int kSquare = 30;  // side of the square in each image
constexpr int kTrainImages = 4;
constexpr int kTestImages = 3;
// In float32, which is exact enough to compare with CPUs.
constexpr const char* kTinyRun = "seed: 1\nepochs: 1\namp: none\nthreads: 1\n";

class GpuTaskTest : public ::testing::Test {
 protected:
  void SetUp() override { SYNCBN_SKIP_UNLESS(base::count_gpus() >= 1, "gpu"); }

  /// @param device "gpu" or "cpu"
  ProgramResult run_on(const std::string& device, const Words& args) const {
    const Env env = device == "cpu" ? Env{{"CUDA_VISIBLE_DEVICES", ""}} : Env();
    const ProgramResult result = run_train(args, env, folder_.path());
    EXPECT_EQ(result.exit_code, 0) << device << ": " << result.err;
    return result;
  }

  /// Trains in the folders "gpu" and "cpu", and expects equal weights and results.
  void expect_same_training(const std::string& config, const Words& on_gpu = {},
                            const Words& on_cpu = {}) const {
    folder_.write("run.yaml", kTinyRun + config);
    for (const std::string device : {"gpu", "cpu"}) {
      const auto& more = device == "gpu" ? on_gpu : on_cpu;
      const auto result = run_on(device, Words{"--config=run.yaml", "--run_dir=" + device} + more);
      EXPECT_EQ(result.err.find("GPU") != std::string::npos, device == "gpu") << result.err;
    }
    ASSERT_FALSE(HasFailure());
    const auto expected = models::read_state_dict(folder_ / "cpu/last.pt");
    const auto found = models::read_state_dict(folder_ / "gpu/last.pt");
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& item : expected) {
      EXPECT_TRUE(at::allclose(found[item.key()], item.value(), /*rtol=*/1e-3, /*atol=*/1e-4))
          << item.key();
    }
    const auto of_cpu = result_of(folder_ / "cpu");
    EXPECT_TRUE(of_cpu.contains("test_loss")) << of_cpu;
    expect_close(result_of(folder_ / "gpu"), of_cpu);
  }

  /// Compares results for the same samples. A share of few samples changes in steps, and one may
  /// differ.
  static void expect_close(const nlohmann::json& found, const nlohmann::json& expected) {
    for (const auto& [key, value] : expected.items()) {
      if (!value.is_number() || key.find("second") != std::string::npos) continue;
      const double number = value;
      const double tolerance =
          key.ends_with("loss") ? 1e-3 * std::max(1.0, std::abs(number)) : 0.05;
      ASSERT_TRUE(found.contains(key)) << key;
      EXPECT_NEAR(found[key].get<double>(), number, tolerance) << key;
    }
  }

  /// Expects `train eval` of the network from the GPU to give the same on both devices.
  void expect_same_evaluation() const {
    const auto evaluated = [&](const std::string& device) {
      return nlohmann::json::parse(
          run_on(device, {"eval", "--config=gpu/config.yaml", "--resume=gpu/last.pt"}).out);
    };
    const auto expected = evaluated("cpu");
    EXPECT_TRUE(expected.contains("loss")) << expected;
    expect_close(evaluated("gpu"), expected);
  }

  /// Runs `train predict` with that network, into the folders of-gpu and of-cpu.
  void predict(const std::string& images) const {
    for (const std::string device : {"gpu", "cpu"}) {
      run_on(device, {"predict", images, "--config=gpu/config.yaml", "--resume=gpu/last.pt",
                      "--output=of-" + device});
    }
  }

  std::string text_of(const std::string& file) const { return base::read_file(folder_ / file); }

  /// The left side of the square in an image.
  static int left_of(int index) { return 5 + 9 * index % (kSide - kSquare - 5); }

  /// Writes FOLDER/0.png and so on: a square on noise, each pixel as `pixel` returns it.
  void write_images(const std::string& folder, int count,
                    const std::function<std::string(bool is_square, int noise)>& pixel) const {
    fs::create_directories(folder_ / folder);
    for (int i = 0; i < count; ++i) {
      std::string pixels;
      for (int y = 0; y < kSide; ++y) {
        for (int x = 0; x < kSide; ++x) {
          const int left = left_of(i);
          const bool is_square = x >= left && x < left + kSquare && y >= left && y < left + kSquare;
          pixels += pixel(is_square, (x * 31 + y * 17 + i * 7) % 61);
        }
      }
      folder_.write(fmt::format("{}/{}.png", folder, i), png(kSide, kSide, pixels));
    }
  }

  static std::string colour(bool is_square, int noise) {
    return {static_cast<char>(is_square ? 230 : 40 + noise), static_cast<char>(60 + noise),
            static_cast<char>(90 - noise)};
  }

  const TempFolder folder_;
};

/// Images with boxes in COCO's format.
class GpuDetectionTest : public GpuTaskTest {
 protected:
  GpuDetectionTest() {
    for (const auto& [split, count] : {std::pair{"train", kTrainImages}, {"test", kTestImages}}) {
      write_images(split, count, colour);
      nlohmann::json file = {{"images", nlohmann::json::array()},
                             {"annotations", nlohmann::json::array()},
                             {"categories", {{{"id", 1}, {"name", "square"}}}}};
      for (int i = 0; i < count; ++i) {
        file["images"].push_back({{"id", i},
                                  {"file_name", fmt::format("{}.png", i)},
                                  {"width", kSide},
                                  {"height", kSide}});
        file["annotations"].push_back({{"id", i},
                                       {"image_id", i},
                                       {"category_id", 1},
                                       {"bbox", {left_of(i), left_of(i), kSquare, kSquare}},
                                       {"area", kSquare * kSquare},
                                       {"iscrowd", 0}});
      }
      folder_.write(fmt::format("{}.json", split), file.dump());
    }
  }

  static std::string config(const std::string& network) {
    return fmt::format(
        "batch_size: 2\ntask: detection\nmodel: {{type: {}, score_thresh: 0.004, "
        "detections_per_img: 20}}\n"
        "data: {{type: coco, train_annotations: train.json, train_images: train, "
        "test_annotations: test.json, test_images: test, "
        "transforms: [{{type: resize, size: 48, max_size: 64}}], "
        "test_transforms: [{{type: resize, size: 48, max_size: 64}}]}}\n"
        "optimizer: {{type: sgd, lr: 0.001, momentum: 0.9}}\n",
        network);
  }

  /// The scores of all detections, in descending order.
  std::vector<double> scores_of(const std::string& device) const {
    std::vector<double> scores;
    for (const auto& row : nlohmann::json::parse(text_of("of-" + device + "/detections.json"))) {
      scores.push_back(row["score"]);
    }
    std::ranges::sort(scores, std::greater());
    return scores;
  }
};

// With 18 layers: with 50, batch norm over 8 values per channel turns another rounding into another
// step. Two instruction sets of one CPU (ONEDNN_MAX_CPU_ISA=SSE41) differ as much.
TEST_F(GpuDetectionTest, TrainsAndPredictsAsOnTheCpu) {
  expect_same_training(config("retinanet_resnet18_fpn"));
  predict("test");
  const std::vector<double> expected = scores_of("cpu");
  const std::vector<double> found = scores_of("gpu");
  EXPECT_GT(expected.size(), 0);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-4) << i;
}

/// Images, and masks of the pixels in the square.
class GpuSegmentationTest : public GpuTaskTest {
 protected:
  GpuSegmentationTest() {
    for (const auto& [split, count] : {std::pair{"train", kTrainImages}, {"test", kTestImages}}) {
      write_images(fmt::format("{}/images", split), count, colour);
      write_images(fmt::format("{}/masks", split), count, [](bool is_square, int noise) {
        constexpr char kIgnored = '\xFF';
        return std::string(1, noise == 0 ? kIgnored : is_square ? '\1' : '\0');
      });
    }
  }

  static std::string config(const std::string& network, const std::string& more = "") {
    return fmt::format(
        "batch_size: 2\ntask: segmentation\nmodel: {}\n"
        "data: {{type: segmentation_folder, train_images: train/images, train_masks: train/masks, "
        "test_images: test/images, test_masks: test/masks, classes: 2, cache_dir: cache, "
        "transforms: [{{type: resize, height: 64, width: 64}}], "
        "test_transforms: [{{type: resize, height: 64, width: 64}}]}}\n"
        "optimizer: {{type: sgd, lr: 0.01}}\n{}",
        network, more);
  }
};

TEST_F(GpuSegmentationTest, TrainsEvaluatesAndPredictsAsOnTheCpu) {
  expect_same_training(config("{type: unet, width: 4}", "update_bn_stats: 2\n"));
  expect_same_evaluation();
  predict("test/images");
  int64_t same = 0;
  for (int i = 0; i < kTestImages; ++i) {
    const auto mask_of = [&](const std::string& device) {
      const std::string file = fmt::format("of-{}/{}.png", device, i);
      const std::string bytes = text_of(file);
      return data::ImageDecoder({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                                file)
          .decode_mask()
          .pixels;
    };
    const auto expected = mask_of("cpu");
    const auto found = mask_of("gpu");
    ASSERT_EQ(found.size(), expected.size());
    for (size_t at = 0; at < found.size(); ++at) same += found[at] == expected[at] ? 1 : 0;
  }
  EXPECT_GE(same, kTestImages * kSide * kSide * 99 / 100);
}

TEST_F(GpuTaskTest, AGanTrainsAsOnTheCpu) {
  expect_same_training(
      "base: " + shipped_config("digits.yaml") +
      "\nmax_steps: 2\nsampler: distributed\ntask: {type: gan, samples: 6}\n"
      "model: {type: dcgan, latent_size: 5, generator_width: 6, discriminator_width: 4}\n"
      "optimizer: {type: sgd, lr: 0.05}\n");
  for (const std::string device : {"gpu", "cpu"}) {
    EXPECT_TRUE(fs::exists(folder_ / (device + "/pictures/samples-000000000002.png"))) << device;
  }
}

TEST_F(GpuTaskTest, ANetworkOfAPluginTrainsAndEvaluatesAsOnTheCpu) {
  expect_same_training(
      fmt::format("base: {}\nplugins: ['{}']\nmax_steps: 3\n"
                  "model: {{type: flawed, flaw: none}}\n",
                  shipped_config("digits.yaml"), SYNCBN_TEST_BIN_DIR "/plugins/libnetworks.so"));
  expect_same_evaluation();
}

TEST_F(GpuTaskTest, AClassifierOfImagesPredictsAndIsExportedAsOnTheCpu) {
  for (const std::string folder : {"train/a", "train/b", "test/a", "test/b"}) {
    const bool is_a = folder.ends_with("a");
    write_images(folder, kTestImages,
                 [is_a](bool is_square, int noise) { return colour(is_square == is_a, noise); });
  }
  const std::string transforms = "[{type: resize, size: 8}, {type: center_crop, size: 8}]";
  expect_same_training(
      fmt::format("batch_size: 2\nmodel: {{type: digits, width: 4}}\n"
                  "data: {{type: image_folder, train: train, test: test, cache_dir: cache, "
                  "transforms: {0}, test_transforms: {0}}}\n",
                  transforms));
  predict("test");
  std::istringstream found(text_of("of-gpu/predictions.csv"));
  std::istringstream expected(text_of("of-cpu/predictions.csv"));
  std::string line, other;
  int lines = 0;
  for (; std::getline(expected, line); ++lines) {
    ASSERT_TRUE(std::getline(found, other)) << line;
    const size_t comma = line.rfind(',');
    EXPECT_EQ(other.substr(0, comma), line.substr(0, comma));
    if (lines == 0) continue;
    EXPECT_NEAR(std::stod(other.substr(comma + 1)), std::stod(line.substr(comma + 1)), 1e-3);
  }
  EXPECT_EQ(lines, 1 + 2 * kTestImages);
  for (const std::string format : {"torchscript", "onnx"}) {
    for (const std::string device : {"gpu", "cpu"}) {
      run_on(device, {"export", "--config=gpu/config.yaml", "--resume=gpu/last.pt",
                      "--format=" + format, fmt::format("--output={}.{}", device, format)});
    }
    EXPECT_EQ(text_of("gpu." + format), text_of("cpu." + format)) << format;
  }
}

TEST_F(GpuTaskTest, ReplicasOnTwoGpusTrainAsOnTheCpu) {
  SYNCBN_SKIP_UNLESS(base::count_gpus() >= 2, "two-gpus");
  const auto replicas = [](const std::string& device) {
    return Words{"--parallel.mode=data_parallel", "--parallel.devices=[" + device + "]"};
  };
  expect_same_training("base: " + shipped_config("digits.yaml") +
                           "\nmax_steps: 6\nmodel: {type: digits, width: 4}\n",
                       replicas("cuda:0, cuda:1"), replicas("cpu, cpu"));
}

TEST_F(GpuTaskTest, AProfileHasTheLayersOfTheNetwork) {
  const ProgramResult result = run_on(
      "gpu",
      digits("run", {"--max_steps=4", "--model.width=4", "--profile.skip=1", "--profile.steps=2"}));
  EXPECT_THAT(result.err, HasSubstr("profile of steps 2 to 3: "));
  const auto summary = nlohmann::json::parse(text_of("run/profile/summary.json"));
  EXPECT_EQ(summary["layers"].size(), 10);
  EXPECT_TRUE(fs::exists(folder_ / ("run/" + summary["trace"].get<std::string>())));
}

// Loading CUDA's libraries takes seconds, and as much memory as the rest of the program.
TEST_F(GpuTaskTest, ARunOnTheCpuLoadsNothingOfCuda) {
  const auto loaded = [&](const std::string& device) {
    const std::string log = folder_ / (device + "-files");
    const ProgramResult result = run_train(
        digits(folder_ / device, {"--max_steps=2", "--model.width=4", "--device=" + device}),
        {{"LD_DEBUG", "files"}, {"LD_DEBUG_OUTPUT", log}});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::string all;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      if (entry.path().string().starts_with(log)) all += base::read_file(entry.path());
    }
    return all;
  };
  EXPECT_NE(loaded("cuda").find("libtorch_cuda.so"), std::string::npos);
  const std::string on_cpu = loaded("cpu");
  EXPECT_NE(on_cpu.find("libtorch_cpu.so"), std::string::npos);
  for (const char* library : {"libtorch_cuda.so", "libc10_cuda.so", "libsyncbn_dist_cuda.so"}) {
    EXPECT_EQ(on_cpu.find(library), std::string::npos) << library;
  }
}

}  // namespace
}  // namespace syncbn::test
