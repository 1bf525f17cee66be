// Detection on images of shapes, with boxes in COCO files.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/data/batch_transforms.h>
#include <syncbn/data/boxes.h>
#include <syncbn/models/detector.h>
#include <syncbn/models/weights.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "e2e/png.h"
#include "e2e/train_program.h"
#include "support/from_yaml.h"
#include "support/skip.h"
#include "train/pycocotools.h"

namespace syncbn::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr const char* kDetector = "{type: retinanet_resnet18_fpn, score_thresh: 0.004}";
constexpr int kTestImages = 7;

class DetectionProgramTest : public ::testing::Test {
 protected:
  DetectionProgramTest() {
    for (const auto& [split, images] : {std::pair{"train", 12}, {"test", kTestImages}}) {
      std::filesystem::create_directories(folder_ / split);
      nlohmann::json file = {{"images", nlohmann::json::array()},
                             {"annotations", nlohmann::json::array()},
                             {"categories",
                              {{{"id", 3}, {"name", "light"}},
                               {{"id", 7}, {"name", "dark"}},
                               {{"id", 9}, {"name", "star"}}}}};
      // Ids descend, so that the order of ids is not that of the file.
      for (int i = images; i > 0; --i) add(split, i, file);
      folder_.write(fmt::format("{}.json", split), file.dump());
    }
    folder_.write("shapes.yaml", fmt::format(R"(
epochs: 1
batch_size: 2
seed: 1
task: detection
model: {}
data: {}
optimizer: {{type: sgd, lr: 0.002, momentum: 0.9}}
memory_format: contiguous
threads: 1
)",
                                             kDetector, data_yaml()));
  }

  std::string data_yaml() const {
    const std::string folder = folder_.path().string();
    return fmt::format(
        "{{type: coco, train_annotations: {0}/train.json, train_images: {0}/train, "
        "test_annotations: {0}/test.json, test_images: {0}/test, "
        "transforms: [random_horizontal_flip, {{type: resize, size: 64, max_size: 96}}], "
        "test_transforms: [{{type: resize, size: 64, max_size: 96}}]}}",
        folder);
  }

  /// Adds an image of up to 120 x 90 pixels with a light and a dark rectangle; some are crowds.
  void add(const std::string& split, int id, nlohmann::json& file) const {
    std::mt19937 random(static_cast<uint32_t>(id) + (split == "test" ? 1000U : 0U));
    const auto below = [&](int bound) {
      return static_cast<int>(random() % static_cast<uint32_t>(bound));
    };
    const int width = 100 + below(21), height = 70 + below(21);
    std::string pixels(static_cast<size_t>(3 * width * height), '\0');
    for (char& value : pixels) value = static_cast<char>(90 + below(60));
    for (const bool is_light : {true, false}) {
      const int w = 35 + below(15), h = 35 + below(30);
      const int x = (is_light ? 0 : 50) + below(50 - w + 1), y = below(height - h);
      for (int i = y; i < y + h; ++i) {
        pixels.replace(static_cast<size_t>(3 * (i * width + x)), static_cast<size_t>(3 * w),
                       static_cast<size_t>(3 * w), static_cast<char>(is_light ? 240 : 10));
      }
      file["annotations"].push_back({{"id", file["annotations"].size() + 1},
                                     {"image_id", id},
                                     {"category_id", is_light ? 3 : 7},
                                     {"bbox", {x, y, w, h}},
                                     {"area", w * h},
                                     {"iscrowd", id % 5 == 4 && is_light ? 1 : 0}});
    }
    const std::string name = fmt::format("{}.png", id);
    file["images"].push_back(
        {{"id", id}, {"file_name", name}, {"width", width}, {"height", height}});
    folder_.write(split + "/" + name,
                  png(static_cast<uint32_t>(width), static_cast<uint32_t>(height), pixels));
  }

  ProgramResult train(int ranks, const Words& more) const {
    return launch_train(ranks,
                        Words{"--config=shapes.yaml", fmt::format("--run_dir=run{}", ranks)} + more,
                        folder_.path());
  }

  nlohmann::json evaluate(int ranks, const Words& more = {}) const {
    const auto evaluated = launch_train(
        ranks, Words{"eval", "--config=run1/config.yaml", "--resume=run1/best.pt"} + more,
        folder_.path());
    EXPECT_EQ(evaluated.exit_code, 0) << evaluated.err;
    EXPECT_THAT(evaluated.err, HasSubstr("map leaves out a class that no image has: star"));
    // After the launcher's prefix.
    return nlohmann::json::parse(evaluated.out.substr(evaluated.out.find('{')));
  }

  /// The detections of run1's network in the test images, with the true boxes.
  std::vector<train::BoxImage> detections() const {
    const at::NoGradGuard no_grad;
    at::set_num_threads(1);  // as in the program: sums in another order have other bits
    const auto set =
        test::from_yaml<data::DatasetKind>(data_yaml(), "data").make(data::Split::kTest);
    const auto& boxes = dynamic_cast<const data::BoxDataset&>(*set);
    const auto model = test::from_yaml<models::ModelKind>(kDetector, "model")
                           .make(models::ModelArgs{.num_classes = set->num_classes()});
    models::load_state_dict(*model, models::read_state_dict(folder_ / "run1/best.pt"));
    model->eval();
    std::vector<train::BoxImage> all;
    for (int64_t i = 0; i < set->size(); ++i) {
      const data::Batch batch = set->get_batch(std::vector{i});
      const auto outputs =
          model->forward_all(data::normalize(batch.data, set->normalization(), batch.sizes));
      const auto found =
          dynamic_cast<const models::Detector&>(*model).detect(outputs, batch.sizes).front();
      train::BoxImage image;
      image.id = boxes.image_id(i);
      for (const data::Annotation& one : boxes.annotations(i)) {
        image.truths.push_back(
            {one.label, {one.x, one.y, one.width, one.height}, one.area, one.is_crowd});
      }
      const data::ImageSize size = boxes.original_size(i);
      const double x = static_cast<double>(size.width) / batch.sizes[0][1].item<double>();
      const double y = static_cast<double>(size.height) / batch.sizes[0][0].item<double>();
      for (int64_t k = 0; k < found.boxes.size(0); ++k) {
        const auto at = [&](int64_t column) { return found.boxes[k][column].item<double>(); };
        image.detections.push_back(
            {found.labels[k].item<int64_t>(),
             found.scores[k].item<double>(),
             {at(0) * x, at(1) * y, (at(2) - at(0)) * x, (at(3) - at(1)) * y}});
      }
      all.push_back(image);
    }
    return all;
  }

  const TempFolder folder_;
};

TEST_F(DetectionProgramTest, EvaluatesTheSameOnAnyNumberOfRanksAndAsPycocotools) {
  for (const int ranks : {1, 2}) {
    const auto trained = train(ranks, {});
    ASSERT_EQ(trained.exit_code, 0) << trained.err;
    const auto result = result_of(folder_ / fmt::format("run{}", ranks));
    EXPECT_TRUE(result.contains("best_test_map")) << result;
    EXPECT_FALSE(result.contains("train_map")) << result;
  }
  const nlohmann::json first = evaluate(1);
  EXPECT_EQ(first["samples"], kTestImages);
  EXPECT_EQ(first["map"], result_of(folder_ / "run1")["best_test_map"]);
  EXPECT_GT(first["mar_100"], 0.1) << first;
  EXPECT_TRUE(first["ap_star"].is_null());
  for (const int ranks : {2, 3}) {
    nlohmann::json other = evaluate(ranks);
    EXPECT_NEAR(other["loss"], first["loss"], 1e-5 * first["loss"].get<double>());
    other["loss"] = first["loss"];
    EXPECT_EQ(other, first) << ranks;
  }
  // Classes are matched by name: a test file may number its categories differently.
  auto renumbered = nlohmann::json::parse(base::read_file(folder_ / "test.json"));
  const std::map<int, int> numbers = {{3, 7}, {7, 3}, {9, 1}};
  for (auto& category : renumbered["categories"]) category["id"] = numbers.at(category["id"]);
  for (auto& box : renumbered["annotations"]) {
    box["category_id"] = numbers.at(box["category_id"]);
  }
  folder_.write("renumbered.json", renumbered.dump());
  EXPECT_EQ(evaluate(1, {"--data.test_annotations=renumbered.json"}), first);
  // The checkpoint contains the classes and their ids: the annotations may have been removed or
  // changed.
  const std::string train_json = base::read_file(folder_ / "train.json");
  std::filesystem::remove(folder_ / "train.json");
  for (const int ranks : {1, 2}) {
    const std::string output = fmt::format("of{}", ranks);
    const auto predicted =
        launch_train(ranks, {"predict", "test", "--config=run1/config.yaml", "--output=" + output},
                     folder_.path());
    ASSERT_EQ(predicted.exit_code, 0) << predicted.err;
  }
  const std::string boxes = base::read_file(folder_ / "of1/detections.json");
  EXPECT_EQ(base::read_file(folder_ / "of2/detections.json"), boxes);
  const auto rows = nlohmann::json::parse(boxes);
  EXPECT_GT(rows.size(), 0);
  for (const auto& row : rows) {
    EXPECT_TRUE(std::filesystem::exists(folder_ / ("test/" + row["file_name"].get<std::string>())));
    EXPECT_EQ(row["category"],
              (std::map<int, std::string>{{3, "light"}, {7, "dark"}, {9, "star"}}.at(
                  row["category_id"])));
    EXPECT_LE(row["bbox"][0].get<double>() + row["bbox"][2].get<double>(), 121);
    EXPECT_GT(row["score"], 0);
  }
  const auto nothing = launch_train(1,
                                    {"predict", "test", "--config=run1/config.yaml",
                                     "--output=none", "--model.score_thresh=0.999"},
                                    folder_.path());
  ASSERT_EQ(nothing.exit_code, 0) << nothing.err;
  EXPECT_TRUE(nlohmann::json::parse(base::read_file(folder_ / "none/detections.json")).empty());
  folder_.write("train.json", train_json);
  auto renamed = nlohmann::json::parse(base::read_file(folder_ / "test.json"));
  std::swap(renamed["categories"][0]["name"], renamed["categories"][1]["name"]);
  folder_.write("renamed.json", renamed.dump());
  const auto warned = launch_train(
      2, {"eval", "--config=run1/config.yaml", "--data.train_annotations=renamed.json"},
      folder_.path());
  EXPECT_EQ(count(warned.err,
                  "was trained with other classes: its class 0 is 'light', and this "
                  "data's is 'dark'"),
            1)
      << warned.err;
  SYNCBN_SKIP_UNLESS(python_has("pycocotools"), "pycocotools");
  const std::vector<double> expected = train::figures_of_pycocotools(detections(), 3);
  std::vector<std::string> names(train::kSummaryNames.begin(), train::kSummaryNames.end());
  for (const char* name : {"ap_light", "ap_dark", "ap_star"}) names.emplace_back(name);
  ASSERT_EQ(expected.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    const auto& value = first[names[i]];
    EXPECT_NEAR(value.is_null() ? -1 : value.get<double>(), expected[i], 1e-12) << names[i];
  }
}

TEST_F(DetectionProgramTest, ImagesAndBoxesWithoutContentAreSaidOnce) {
  auto file = nlohmann::json::parse(base::read_file(folder_ / "train.json"));
  auto& annotations = file["annotations"];
  for (auto& box : annotations) {
    if (box["image_id"] == 1) box["bbox"] = {5, 5, 0, 8};
  }
  annotations.erase(std::remove_if(annotations.begin(), annotations.end(),
                                   [](const auto& box) { return box["image_id"] == 2; }),
                    annotations.end());
  folder_.write("train.json", file.dump());
  const auto result = train(2, {"--max_steps=2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count(result.err, "images without annotations in"), 1) << result.err;
  EXPECT_EQ(count(result.err, "boxes without area in"), 1) << result.err;
  annotations.clear();
  folder_.write("train.json", file.dump());
  const auto refused = train(2, {"--run_dir=none"});
  EXPECT_EQ(refused.exit_code, base::kExitUsage);
  EXPECT_EQ(count(refused.err, "has no box to learn from"), 1) << refused.err;
}

TEST_F(DetectionProgramTest, AFaultyBoxEndsARunAtItsStartUnlessErrorsAreSkipped) {
  auto file = nlohmann::json::parse(base::read_file(folder_ / "train.json"));
  file["annotations"][0]["bbox"] = {-9, 0, 20, 20};
  folder_.write("train.json", file.dump());
  const std::string fault = "1 of 24 annotations cannot be used: the box of annotation 1 ([-9, 0";
  const std::string skip = "--loader.on_error=skip";
  const auto refused = train(2, {});
  EXPECT_EQ(refused.exit_code, base::kExitUsage);
  EXPECT_EQ(count(refused.err, fault), 1) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("loader.on_error=skip"));
  const auto trained = train(2, {skip, "--max_steps=1"});
  EXPECT_EQ(trained.exit_code, 0) << trained.err;
  EXPECT_EQ(count(trained.err, fault), 1) << trained.err;

  const auto named = run_train({"check", "shapes.yaml"}, {}, folder_.path());
  EXPECT_EQ(named.exit_code, base::kExitUsage);
  EXPECT_EQ(count(named.err, fault), 1) << named.err;
  EXPECT_EQ(count(named.out, "all can be read"), 2) << named.out;
  EXPECT_THAT(named.err, HasSubstr("check: data that the warnings name cannot be used; mend or "
                                   "remove the files, or train without them: "
                                   "loader.on_error=skip\n"));
  EXPECT_EQ(run_train({"check", "shapes.yaml", skip}, {}, folder_.path()).exit_code, 0);

  // No background: the only other box of the image is faulty as well.
  file["annotations"][1]["bbox"] = {0, 0, 20, -1};
  folder_.write("train.json", file.dump());
  const auto without = train(2, {skip, "--max_steps=1", "--overwrite"});
  EXPECT_EQ(without.exit_code, 0) << without.err;
  EXPECT_THAT(without.err, HasSubstr("2 of 24 annotations cannot be used, and 1 image that has no "
                                     "other: the box of annotation 1"));
  EXPECT_THAT(without.err, HasSubstr("11 training and "));
  EXPECT_EQ(count(without.err, "they are background"), 0) << without.err;

  for (const char* name : {"3.png", "5.png"}) std::filesystem::remove(folder_ / "train" / name);
  const auto gone = run_train({"check", "shapes.yaml"}, {}, folder_.path());
  EXPECT_THAT(gone.err, ContainsRegex("there is no file for 2 of 11 photos, such as '[^']*3.png'; "
                                      "put the file there, or [^\n]*; 1 more: [^,\n]*5.png\n"));
  EXPECT_EQ(count(gone.err, "3.png"), 1) << gone.err;
}

TEST_F(DetectionProgramTest, CheckReadsImagesWithBoxes) {
  const auto whole = run_train({"check", "shapes.yaml"}, {}, folder_.path());
  EXPECT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_EQ(count(whole.out, "all can be read"), 2) << whole.out;
}

}  // namespace
}  // namespace syncbn::test
