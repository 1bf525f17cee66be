#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/data/boxes.h>
#include <syncbn/data/image_ops.h>
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
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

constexpr const char* kImages = R"("images": [
  {"id": 9, "file_name": "nine.jpg", "width": 40, "height": 30, "license": 3},
  {"id": 4, "file_name": "four.jpg", "width": 20, "height": 50},
  {"id": 7, "file_name": "seven.jpg", "width": 40, "height": 30}])";
constexpr const char* kCategories = R"("categories": [
  {"id": 17, "name": "cat", "supercategory": "animal"}, {"id": 3, "name": "car"}])";
constexpr const char* kAnnotations = R"("annotations": [
  {"id": 100, "image_id": 9, "category_id": 17, "bbox": [30.5, 10, 10.25, 20], "area": 150.5,
   "iscrowd": 0, "segmentation": [[30.5, 10, 40, 10, 40, 30]]},
  {"id": 101, "image_id": 4, "category_id": 3, "bbox": [1, 2, 3, 4], "iscrowd": 1, "area": 7,
   "segmentation": {"counts": [5, 6], "size": [50, 20], "id": 1}, "text": ["]\"[", [[], ["]"]]]},
  {"id": 103, "image_id": 9, "category_id": 3, "bbox": [0, 0, 0, 5], "area": 0, "iscrowd": 0},
  {"id": 102, "image_id": 9, "category_id": 3, "bbox": [2, 4, 8, 6]}])";

std::string file_of(const std::string& images = kImages,
                    const std::string& categories = kCategories,
                    const std::string& annotations = kAnnotations) {
  return fmt::format(R"({{"info": {{"id": 5, "images": []}}, {}, {}, {}}})", annotations, images,
                     categories);
}

class CocoTest : public ::testing::Test {
 protected:
  CocoTest() {
    fs::create_directory(folder_ / "photos");
    for (const auto& [name, width, height] :
         {std::tuple{"nine", 40, 30}, {"four", 20, 50}, {"seven", 40, 30}}) {
      folder_.write(fmt::format("photos/{}.jpg", name), test::write_jpeg(picture(width, height)));
    }
    write(file_of());
  }

  void write(const std::string& json) const { folder_.write("instances.json", json); }

  CocoOptions options() const {
    CocoOptions made;
    made.train_annotations = folder_ / "instances.json";
    made.train_images = folder_ / "photos";
    return made;
  }

  std::shared_ptr<const BoxDataset> load(const CocoOptions& options,
                                         Split split = Split::kTrain) const {
    return std::dynamic_pointer_cast<const BoxDataset>(load_coco(options, split));
  }
  std::shared_ptr<const BoxDataset> load() const { return load(options()); }

  const test::TempFolder folder_;
};

/// The rows of a target as lists.
std::vector<std::vector<double>> rows_of(const at::Tensor& target) {
  const at::Tensor values = BoxTarget::decode(target);
  std::vector<std::vector<double>> rows;
  for (int64_t i = 0; i < values.size(0); ++i) {
    const auto* row = values[i].const_data_ptr<double>();
    rows.emplace_back(row, row + BoxTarget::kColumns);
  }
  return rows;
}

TEST_F(CocoTest, ReadsImagesSortedByIdWithTheirAnnotations) {
  const auto set = load();
  EXPECT_EQ(set->size(), 3);
  EXPECT_THAT(set->class_names(), ElementsAre("car", "cat"));
  EXPECT_TRUE(set->labels().empty());
  EXPECT_FALSE(labels_pixels(*set));
  EXPECT_THAT((std::vector{set->image_id(0), set->image_id(1), set->image_id(2)}),
              ElementsAre(4, 7, 9));
  EXPECT_EQ(set->original_size(0), (ImageSize{20, 50}));
  EXPECT_THAT(set->name_of(2), HasSubstr("photos/nine.jpg"));

  EXPECT_THAT(set->annotations(1), SizeIs(0));
  const auto crowd = set->annotations(0);
  ASSERT_THAT(crowd, SizeIs(1));
  EXPECT_TRUE(crowd[0].is_crowd);
  EXPECT_EQ(crowd[0].area, 7);
  const auto nine = set->annotations(2);
  ASSERT_THAT(nine, SizeIs(3));
  EXPECT_EQ(nine[0].id, 100);
  EXPECT_EQ(nine[0].label, 1);
  EXPECT_EQ(nine[0].x, 30.5);
  EXPECT_EQ(nine[0].width, 10.25);
  EXPECT_EQ(nine[0].area, 150.5);
  EXPECT_FALSE(nine[0].is_crowd);
  EXPECT_EQ(nine[2].area, 48) << "of the box";
}

TEST_F(CocoTest, TargetsHaveTheBoxesOfTheTransformedImage) {
  CocoOptions flipped = options();
  flipped.transforms = {component("resize", {{"size", "60"}, {"max_size", "100"}}),
                        component("random_horizontal_flip", {{"p", "1"}})};
  const auto set = load(flipped);
  EXPECT_TRUE(set->sizes_vary());
  EXPECT_EQ(set->sample_shape(), (std::vector<int64_t>{3, 100, 100}));
  EXPECT_EQ(set->target_shape(), (std::vector<int64_t>{3, 5}));
  const Batch batch = set->get_batch(std::vector<int64_t>{2, 0});
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{2, 3, 100, 96}));
  EXPECT_TRUE(at::equal(batch.sizes, at::tensor({60, 80, 100, 40}, at::kLong).view({2, 2})));
  // Image 9 is twice as large and mirrored. The box of width 0 is left out, and the first box,
  // which exceeds the image by 0.75 pixels, is clipped to it.
  EXPECT_THAT(rows_of(batch.target[0]),
              ElementsAre(ElementsAre(2, 30, 40, 60, 80), ElementsAre(1, 0, 20, 80 - 61, 60),
                          ElementsAre(0, 80 - 20, 8, 80 - 4, 20)));
  EXPECT_THAT(rows_of(batch.target[1]),
              ElementsAre(ElementsAre(0, 50, 20, 100, 40), ElementsAre(-1, 0, 0, 0, 0),
                          ElementsAre(-1, 0, 0, 0, 0)));

  Image image = resize(load_image(folder_ / "photos/nine.jpg"), 80, 60);
  flip_horizontally(image);
  const at::Tensor expected = at::tensor(at::ArrayRef<uint8_t>(image.pixels), at::kByte)
                                  .view({60, 80, 3})
                                  .permute({2, 0, 1});
  EXPECT_TRUE(at::equal(batch.data[0].slice(1, 0, 60).slice(2, 0, 80), expected));
}

TEST_F(CocoTest, NeedsNoTransforms) {
  EXPECT_EQ(load()->sample_shape(), (std::vector<int64_t>{3, 50, 40}));
  write(file_of(R"("images": [{"id": 9, "file_name": "nine.jpg", "width": 40, "height": 30}])",
                kCategories, R"("annotations": [])"));
  CocoOptions test = options();
  std::swap(test.train_annotations, test.test_annotations);
  std::swap(test.train_images, test.test_images);
  const auto set = load(test, Split::kTest);
  EXPECT_FALSE(set->sizes_vary()) << "all images have the same size";
  const Batch batch = set->get_batch(std::vector<int64_t>{0});
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{1, 3, 30, 40}));
  EXPECT_THAT(rows_of(batch.target[0]), ElementsAre(ElementsAre(0, 30, 40, 30, 40)));
}

TEST_F(CocoTest, BoxesLessThanAPixelWideAreLeftOut) {
  CocoOptions smaller = options();
  smaller.transforms = {component("resize", {{"height", "5"}, {"width", "4"}})};
  // After the resize, the boxes of image 9 are 0.95 and 0.8 pixels wide.
  const Batch batch = load(smaller)->get_batch(std::vector<int64_t>{2});
  EXPECT_THAT(rows_of(batch.target[0]),
              ElementsAre(ElementsAre(2, 30, 40, 5, 4), ElementsAre(-1, 0, 0, 0, 0),
                          ElementsAre(-1, 0, 0, 0, 0)));
}

TEST_F(CocoTest, ASubsetKeepsTheIndicesOfTheWhole) {
  const auto set = load();
  const auto some = std::dynamic_pointer_cast<const BoxDataset>(subset(set, {2, 1}));
  ASSERT_NE(some, nullptr);
  EXPECT_EQ(&some->whole(), set.get());
  EXPECT_EQ(some->image_id(0), 9);
  EXPECT_EQ(some->original_size(0), (ImageSize{40, 30}));
  EXPECT_EQ(some->annotations(0).data(), set->annotations(2).data());
  Loader loader(some, {.batch_size = 1, .num_workers = 2});
  loader.start_epoch(0);
  const Batch batch = *loader.next();
  EXPECT_EQ(rows_of(batch.target[0])[0][BoxTarget::kIndex], 2);
}

TEST_F(CocoTest, RefusesFilesWithMistakes) {
  const auto refusal = [this](const std::string& json, const std::string& why) {
    write(json);
    EXPECT_THAT([this] { load(); },
                ThrowsMessage<base::UserError>(AllOf(HasSubstr("instances.json'"), HasSubstr(why))))
        << why;
  };
  const auto with = [](const std::string& annotation) {
    return file_of(kImages, kCategories, R"("annotations": [)" + annotation + "]");
  };
  for (const char* empty : {"", " \n"}) refusal(empty, "is not JSON: it is empty");
  refusal("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
          "is not JSON: it is a pointer of Git LFS, not the file: fetch it with `git lfs pull`");
  refusal("<!DOCTYPE html>", "is not JSON: it is HTML");
  for (const size_t size : {1, 30, 150, 200, 600}) {
    refusal(file_of().substr(0, size), "is not JSON: it ends too early; it was cut short");
  }
  refusal(R"({"images": ;)", "damaged at byte 12");
  std::string damaged = file_of();
  const size_t colon = damaged.find(": 103");
  damaged[colon] = ';';  // after the polygons
  refusal(damaged, fmt::format("damaged at byte {}", colon + 1));
  refusal("[]", "no list 'images'");
  refusal(fmt::format("{{{}, {}}}", kImages, kCategories), "no list 'annotations'");
  refusal(fmt::format("{{{}, {}}}", kImages, kAnnotations), "no list 'categories'");
  refusal(file_of(kImages, R"("categories": [])"), "has no categories");
  refusal(file_of(R"("images": [])"), "has no images");
  refusal(file_of(R"("images": [])", kCategories, R"("annotations": [])"), "has no images");
  refusal(with(R"({"id": 5, "image_id": 9, "category_id": 3, "bbox": [1, 1, 0, 2]})"),
          "has no box to learn from (0 of 1 annotations are crowds: iscrowd)");
  refusal(with(R"({"id": 5, "image_id": 9, "category_id": 3, "bbox": [1, 1, 2, 2], "iscrowd": 1})"),
          "has no box to learn from (1 of 1 annotations are crowds: iscrowd)");
  for (const char* texts : {R"(["car", "cat"])", "[3]", R"({"3": "car"})"}) {
    refusal(file_of(kImages, fmt::format(R"("categories": {})", texts)),
            "each category must be an object with id and name");
  }
  refusal(file_of(R"("images": [{"id": 1, "file_name": "a.jpg", "width": 4.5, "height": 3}])"),
          "image 1 has the width 4.5, which is not a whole number; give the photo's width and "
          "height in pixels");
  refusal(file_of(R"("images": [{"id": 1, "file_name": "a.jpg", "width": 4, "height": null}])"),
          "image 1 has the height null, which is not a whole number; give the photo's width and");
  refusal(file_of(R"("images": [{"id": 1, "file_name": "a.jpg", "height": 3}])"),
          "image 1 has no whole number 'width'; give the photo's width and height in pixels");
  refusal(file_of(R"("images": [{"id": "img_7", "file_name": "a.jpg", "width": 4, "height": 3}])"),
          R"(image number 0 (from 0) has the id "img_7", which is not a whole number)");
  refusal(file_of(R"("images": [{"id": 1, "file_name": null, "width": 4, "height": 3}])"),
          "image 1 has no text 'file_name'");
  refusal(file_of(R"("images": [{"id": 9, "file_name": "a.jpg", "width": 0, "height": 0}])"),
          "image 9 has 0 x 0 pixels; give the photo's width and height in pixels");
  refusal(file_of(R"("images": [{"id": 9, "file_name": "a.jpg", "width": 4, "height": -1}])"),
          "image 9 has 4 x -1 pixels");
  refusal(file_of(R"("images": [{"file_name": "a.jpg", "width": 4, "height": 3}])"),
          "image number 0 (from 0) has no whole number 'id'");
  refusal(with(R"({"id": 5, "image_id": 9, "category_id": 17})"),
          "annotation 5 has no 'bbox' of 4 numbers");
  refusal(with(R"({"id": 5, "image_id": 9, "bbox": [1, 1, 2, 2]})"),
          "annotation 5 has no whole number 'category_id'");
  refusal(with(R"({"id": 5, "image_id": 9, "category_id": 2, "bbox": [1, 1, 2, 2]})"),
          "annotation 5 has the category_id 2, which the file does not list");
  refusal(with(R"({"id": 5, "image_id": 8, "category_id": 3, "bbox": [1, 1, 2, 2]})"),
          "annotation 5 has the image_id 8, which");
  for (const char* box : {"[1, 1, -2, 2]", "[1, 1, 2, -2]", "[-2, 1, 8, 2]", "[1, 1, 41, 2]",
                          "[1, 1, 2, 31]", "[1, -1.5, 2, 2]"}) {
    refusal(
        with(fmt::format(R"({{"id": 5, "image_id": 9, "category_id": 3, "bbox": {}}})", box)),
        fmt::format("the box of annotation 5 ({}) is not within image 9 (40 x 30 pixels)", box));
  }
  std::vector<std::string> bad;
  for (int id = 0; id < 11; ++id) {
    bad.push_back(
        fmt::format(R"({{"id": {}, "image_id": 9, "category_id": {}, "bbox": [1, 1, 2, 99]}})", id,
                    2 + id % 2));
  }
  refusal(with(bad[0] + ", " + bad[1]),
          "annotation 0 has the category_id 2, which the file does not list\n  the box of "
          "annotation 1 ([1, 1, 2, 99]) is not within");
  refusal(with(base::join(bad, ", ")), "which the file does not list\n  the box of annotation 9");
  refusal(with(base::join(bad, ", ")),
          "11 of 11 annotations cannot be used, and 1 image that has no other: annotation 0 has");
  refusal(with(base::join(bad, ", ")), "[x, y, width, height]\n  …");
  refusal(file_of(R"("images": [{"id": 9, "file_name": "a", "width": 4, "height": 3},
                                {"id": 9, "file_name": "b", "width": 4, "height": 3}])"),
          "two images with the id 9, 'a' and 'b'; correct or remove one of them (another id is "
          "needed in its annotations as well)");
  refusal(file_of(kImages, R"("categories": [{"id": 3, "name": "a"}, {"id": 3, "name": "b"}])"),
          "two categories with the id 3, 'a' and 'b'; correct or");
}

/// Replaces the first occurrence in file_of().
std::string changed(const std::string& from, const std::string& to) {
  std::string file = file_of();
  const size_t at = file.find(from);
  EXPECT_NE(at, file.npos) << from;
  return file.replace(at, from.size(), to);
}

TEST_F(CocoTest, ReadsNumbersAsToolsWriteThem) {
  const uint64_t expected = load()->fingerprint();
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {R"("image_id": 9,)", R"("image_id": 9.0,)"},
           {R"("image_id": 9,)", R"("image_id": "9",)"},
           {R"("id": 4,)", R"("id": "4.0",)"},
           {R"("category_id": 17,)", R"("category_id": 1.7e1,)"},
           {R"("width": 20,)", R"("width": "20",)"},
           {R"("height": 50)", R"("height": 50.0)"},
           {"[30.5, 10, 10.25, 20]", R"(["30.5", "10.0", 10.25, 2e1])"},
           {"[30.5, 10, 10.25, 20]", R"("30.5 10 10.25 20")"},
           {"[30.5, 10, 10.25, 20]", R"("[30.5, 10.0, 10.25, 20]")"},
           {"[30.5, 10, 10.25, 20]", R"x("(30.5,10,10.25,20)")x"},
           {R"("area": 7,)", R"("area": "7.0",)"},
           {R"("area": 0,)", R"("area": NaN,)"},
           {R"("area": 0,)", R"("area": -Infinity,)"},
           {R"("iscrowd": 1,)", R"("iscrowd": true,)"},
           {R"("iscrowd": 1,)", R"("iscrowd": "True",)"},
           {R"("iscrowd": 1,)", R"("iscrowd": 1.0,)"},
           {R"("iscrowd": 0,)", R"("iscrowd": NaN,)"},
           {R"("iscrowd": 0,)", R"("iscrowd": false,)"},
           {R"("iscrowd": 0,)", R"("iscrowd": null,)"},
           {R"("license": 3)", R"("license": Infinity)"},
           {"[[30.5, 10,", "[[NaN, 10,"},
           {"[5, 6]", "[NaN, -Infinity]"},
           {R"("info": {)", R"("info": {"a": nan, "b": [-inf], "NaN": "-Infinity NaN", )"}}) {
    write(changed(from, to));
    const auto set = load();
    EXPECT_EQ(set->fingerprint(), expected) << to;
    EXPECT_THAT(set->remarks(), SizeIs(0)) << to;
  }
  write(changed(R"("name": "car")", R"("name": 12)"));
  EXPECT_THAT(load()->class_names(), ElementsAre("12", "cat"));
  write(changed(R"("height": 50)", R"("height": NaN)"));
  EXPECT_THAT([this] { load(); }, ThrowsMessage<base::UserError>(HasSubstr(
                                      "image 4 has the height NaN, which is not a whole number")));
}

TEST_F(CocoTest, AFileThatIsNoJsonAfterANanIsDamagedThere) {
  std::string file = changed("30.5, 10, 10.25", "NaN, -Infinity, 10.25");
  const size_t at = file.find(": 103");
  write(file.replace(at, 1, ";"));
  EXPECT_THAT([this] { load(); },
              ThrowsMessage<base::UserError>(HasSubstr(fmt::format("at byte {}", at + 1))));
  for (const char* text : {"NaN", "[NaN", "{\"a\": -Infinity", "{\"a\": -Inf}"}) {
    write(text);
    EXPECT_THAT([this] { load(); }, ThrowsMessage<base::UserError>(HasSubstr("is not JSON")))
        << text;
  }
}

TEST_F(CocoTest, BoxesNeedNoIdsOfTheirOwn) {
  const uint64_t expected = load()->fingerprint();
  std::string file = changed(R"("id": 100, )", "");
  const size_t at = file.find(R"("id": 102)");
  write(file.replace(at, 9, R"("id": 103)"));
  const auto set = load();
  EXPECT_EQ(set->fingerprint(), expected);
  ASSERT_THAT(set->remarks(), SizeIs(1));
  EXPECT_THAT(set->remarks()[0].text,
              HasSubstr("instances.json': 2 of 4 annotations have no id, or that of another"));
  EXPECT_FALSE(set->remarks()[0].is_fault);
}

TEST_F(CocoTest, AnnotationsMayShareAnId) {
  const std::string first = R"({"id": 103,)";
  const std::string other =
      R"({"id": 102, "image_id": 9, "category_id": 3, "bbox": [2, 4, 8, 7]}, )";
  write(changed(first, other + first));
  EXPECT_EQ(load()->annotations(2).size(), 4U);
  EXPECT_THAT(load()->remarks().at(0).text, HasSubstr("1 of 5 annotations have no id, or that"));
}

TEST_F(CocoTest, NamesClassesWithoutABoxToLearnFrom) {
  EXPECT_THAT(survey(*load(), Split::kTrain, std::chrono::minutes(1)), SizeIs(0));
  // The other boxes of cars are a crowd and one without a width.
  write(changed(R"("id": 102, "image_id": 9, "category_id": 3)",
                R"("id": 102, "image_id": 9, "category_id": 17)"));
  EXPECT_THAT(survey(*load(), Split::kTrain, std::chrono::minutes(1)),
              ElementsAre("train: no box of class car"));
}

/// Without the annotations that cannot be used, a set is that of a file without them.
TEST_F(CocoTest, LeavesOutAnnotationsThatCannotBeUsed) {
  const std::string good = R"({"id": 1, "image_id": 9, "category_id": 3, "bbox": [1, 1, 2, 2]})";
  const auto with = [](const std::string& annotations) {
    return file_of(kImages, kCategories, R"("annotations": [)" + annotations + "]");
  };
  write(with(good));
  const auto expected = load();
  EXPECT_THAT(expected->remarks(), SizeIs(0));
  for (const auto& [bad, why] : std::vector<std::pair<std::string, std::string>>{
           {R"("image_id": 9, "category_id": 3, "bbox": [1, NaN, 2, 2])",
            "the box of annotation 5 ([1, nan, 2, 2]) has NaN or Infinity, in image 9"},
           {R"("image_id": 9, "category_id": 3, "bbox": [1, 1, 2, Infinity])",
            "the box of annotation 5 ([1, 1, 2, inf]) has NaN or Infinity, in image 9"},
           {R"("image_id": 9, "category_id": 3, "bbox": [-Infinity, -inf, "inf", 1e308])",
            "the box of annotation 5 ([-inf, -inf, inf, 1e+308]) has NaN or Infinity, in image "
            "9"},
           {R"("image_id": 9, "category_id": 3, "bbox": [null, 1, 2, "x"])",
            "the box of annotation 5 ([nan, 1, 2, nan]) has NaN or Infinity"},
           {R"("image_id": 9, "category_id": 3, "bbox": [-3, 1, 8, 2])",
            "the box of annotation 5 ([-3, 1, 8, 2]) is not within image 9 (40 x 30 pixels)"},
           {R"("image_id": 9, "category_id": 3, "bbox": [])", "annotation 5 has no 'bbox' of 4"},
           {R"("image_id": 9, "category_id": 3, "bbox": "10 20 30")",
            "annotation 5 has no 'bbox' of 4"},
           {R"("image_id": 9, "category_id": 3, "segmentation": [[1, 1, 9, 1, 9, 9]])",
            "annotation 5 has no 'bbox' of 4 numbers, [x, y, width, height] (the polygons of a "
            "'segmentation' are not read)"},
           {R"("image_id": 9, "category_id": NaN, "bbox": [1, 1, 2, 2])",
            "annotation 5 has the category_id NaN, which is not a whole number"},
           {R"("image_id": 9, "category_id": 1.5, "bbox": [1, 1, 2, 2])",
            "annotation 5 has the category_id 1.5, which is not a whole number"},
           {R"("image_id": null, "category_id": 3, "bbox": [1, 1, 2, 2])",
            "annotation 5 has the image_id null, which is not a whole number"},
           {R"("image_id": "img_7", "category_id": 3, "bbox": [1, 1, 2, 2])",
            R"(annotation 5 has the image_id "img_7", which is not a whole number)"},
           {R"("category_id": 3, "bbox": [1, 1, 2, 2])",
            "annotation 5 has no whole number 'image_id'"},
           {R"("image_id": 8, "category_id": 3, "bbox": [1, 1, 2, 2])",
            "annotation 5 has the image_id 8, which the file does not list"}}) {
    write(with(fmt::format(R"({{"id": 5, {}}}, {})", bad, good)));
    const auto set = load();
    EXPECT_EQ(set->fingerprint(), expected->fingerprint()) << bad;
    ASSERT_THAT(set->remarks(), SizeIs(1)) << bad;
    EXPECT_THAT(set->remarks()[0].text,
                HasSubstr("instances.json': 1 of 2 annotations cannot be used: " + why));
    EXPECT_TRUE(set->remarks()[0].is_fault);
  }
  write(with(good + R"(, {"image_id": 9, "category_id": 3, "bbox": [1, 1, 2]})"));
  EXPECT_THAT(load()->remarks().at(0).text,
              HasSubstr("annotation number 1 (from 0) has no 'bbox'"));
}

/// Such an image is no background. One that never had a box is, and one whose objects are of no
/// class.
TEST_F(CocoTest, LeavesOutImagesAllOfWhoseBoxesAreFaulty) {
  const std::string good = R"({"id": 1, "image_id": 9, "category_id": 3, "bbox": [1, 1, 2, 2]})";
  const auto write_with = [&](const std::string& annotations) {
    write(file_of(kImages, kCategories, R"("annotations": [)" + annotations + "]"));
  };
  for (const char* bad :
       {R"("image_id": 4, "category_id": 3, "bbox": [-3, 1, 8, 2])",
        R"("image_id": 4, "category_id": 3, "bbox": [1, NaN, 8, 2])",
        R"("image_id": 4, "category_id": 3, "bbox": [])", R"("image_id": 4, "bbox": null)",
        R"("image_id": 4, "category_id": 3, "segmentation": [[1, 1, 9, 1, 9, 9]])"}) {
    const std::string both = fmt::format(R"({{"id": 5, {0}}}, {{"id": 6, {0}}}, )", bad);
    write_with(both + good);
    const auto set = load();
    EXPECT_EQ(set->size(), 2) << bad;
    EXPECT_EQ(set->image_id(0), 7) << "background";
    EXPECT_THAT(set->annotations(1), SizeIs(1)) << bad;
    ASSERT_THAT(set->remarks(), SizeIs(1));
    EXPECT_THAT(set->remarks()[0].text,
                HasSubstr("2 of 3 annotations cannot be used, and 1 image that has no other: "))
        << bad;
    EXPECT_TRUE(set->remarks()[0].is_fault);
    write_with(both + good + R"(, {"image_id": 4, "category_id": 3, "bbox": [1, 1, 2, 2]})");
    EXPECT_EQ(load()->size(), 3) << bad;
    EXPECT_THAT(load()->remarks().back().text, HasSubstr("2 of 4 annotations cannot be used: "));
  }
  for (const char* other : {R"("category_id": 3, "bbox": [1, 1, 0, 2])",  // without area
                            R"("category_id": 5, "bbox": [1, 1, 2, 2])",  // of an unknown category
                            R"("bbox": [1, 1, 2, 2])"}) {                 // of none
    write_with(fmt::format(R"({{"id": 5, "image_id": 4, {}}}, )", other) + good);
    EXPECT_EQ(load()->size(), 3) << other;
  }
  const std::string faulty = R"("category_id": 3, "bbox": [1, 1, 99, 2])";
  write_with(
      fmt::format(R"({{"id": 5, "image_id": 4, {0}}}, {{"id": 6, "image_id": 7, {0}}}, )", faulty) +
      good);
  EXPECT_EQ(load()->size(), 1);
  EXPECT_THAT(load()->remarks().at(0).text, HasSubstr(", and 2 images that have no other: "));
  write(file_of(R"("images": [{"id": 9, "file_name": "nine.jpg", "width": 40, "height": 30}])",
                kCategories,
                R"("annotations": [{"image_id": 9, "category_id": 3, "bbox": [1, 1, 2, 99]}])"));
  EXPECT_THAT([this] { load(); },
              ThrowsMessage<base::UserError>(AllOf(
                  HasSubstr("1 of 1 annotations cannot be used, and 1 image that has no other; no "
                            "image is left: "),
                  HasSubstr("[1, 1, 2, 99]"))));
}

/// The faulty boxes of the repetition are those of the image that is kept.
TEST_F(CocoTest, LeavesOutARepeatedImageAllOfWhoseBoxesAreFaulty) {
  for (const char* bad : {R"("segmentation": [[1, 1, 9, 1, 9, 9]])", R"("bbox": [1, 1, 99, 2])"}) {
    for (const int image : {4, 30}) {
      const std::string good =
          R"({"id": 1, "image_id": 9, "category_id": 3, "bbox": [1, 1, 2, 2]})";
      const auto size_with = [&](const std::string& more) {
        write(file_of(
            R"("images": [{"id": 9, "file_name": "nine.jpg", "width": 40, "height": 30},
                          {"id": 4, "file_name": "four.jpg", "width": 20, "height": 50},
                          {"id": 30, "file_name": "four.jpg", "width": 20, "height": 50}])",
            kCategories,
            fmt::format(R"("annotations": [{{"image_id": {}, "category_id": 3, {}}}, {}{}])", image,
                        bad, more, good)));
        return load()->size();
      };
      EXPECT_EQ(size_with(""), 1) << image << bad;
      for (const int other : {4, 30}) {
        EXPECT_EQ(size_with(fmt::format(
                      R"({{"image_id": {}, "category_id": 3, "bbox": [1, 1, 2, 2]}}, )", other)),
                  2)
            << image << bad << other;
      }
    }
  }
}

TEST_F(CocoTest, SaysThatBoxesLookLikeCorners) {
  const auto remark = [&](const std::vector<std::string>& boxes) {
    std::string list;
    for (size_t i = 0; i < boxes.size(); ++i) {
      list += fmt::format(R"({}{{"id": {}, "image_id": 9, "category_id": 3, "bbox": {}}})",
                          i == 0 ? "" : ", ", i, boxes[i]);
    }
    write(file_of(kImages, kCategories, R"("annotations": [)" + list + "]"));
    const auto remarks = load()->remarks();
    return remarks.empty() ? "" : remarks.front().text;
  };
  const std::string inner = "[2, 1, 12, 11]";  // fits in both forms
  const std::string outer = "[20, 10, 40, 30]";
  std::vector<std::string> boxes(10, inner);
  EXPECT_EQ(remark(boxes), "") << "no box is faulty";
  boxes[0] = outer;
  EXPECT_THAT(remark(boxes),
              HasSubstr("1 of 10 annotations cannot be used; the boxes look like [x1, y1, x2, y2]; "
                        "COCO's are [x, y, width, height]: subtract x1 and y1 from x2 and y2 in "
                        "all boxes: the box of annotation 0 "));
  for (const char* other : {"[1, 1, 2, 99]",      // y2 is outside
                            "[-2, 1, 40, 2]",     // x1 is
                            "[30, 1, 20, 2]",     // x2 < x1
                            "[1, 25, 2, 20]",     // y2 < y1
                            "[30, 20, 5, 5]"}) {  // no fault, and no corners
    boxes[1] = other;
    EXPECT_THAT(remark(boxes), HasSubstr("look like")) << "9 of 10: " << other;
    boxes[2] = other;
    EXPECT_THAT(remark(boxes), Not(HasSubstr("look like"))) << "8 of 10: " << other;
    boxes[2] = inner;
  }
  boxes.assign(11, inner);
  boxes[0] = outer;
  EXPECT_THAT(remark(boxes), Not(HasSubstr("look like"))) << "only 1 of 11 is faulty";
  // Good boxes, and one that is 3 pixels too wide.
  boxes.assign(10, "[20, 10, 10, 10]");
  boxes[0] = "[20, 10, 23, 10]";
  EXPECT_THAT(remark(boxes), AllOf(HasSubstr("1 of 10 annotations cannot be used: the box of"),
                                   Not(HasSubstr("look like"))));
  // An unknown category is no fault of the box.
  write(file_of(kImages, kCategories, R"("annotations": [
      {"id": 1, "image_id": 9, "category_id": 3, "bbox": [2, 1, 12, 11]},
      {"id": 2, "image_id": 9, "category_id": 5, "bbox": [2, 1, 12, 11]}])"));
  EXPECT_THAT(load()->remarks().at(0).text, Not(HasSubstr("look like")));
}

/// Merged files, and Roboflow's root category if there is only one class.
TEST_F(CocoTest, CategoriesWithTheSameNameAreOneClass) {
  const uint64_t expected = load()->fingerprint();
  const std::string twin = R"({"id": 20, "name": "cat"}, )";
  const std::string categories =
      R"("categories": [)" + twin + R"({"id": 17, "name": "cat"}, {"id": 3, "name": "car"}])";
  std::string annotations = kAnnotations;
  write(file_of(kImages, categories, annotations.replace(annotations.find("17"), 2, "20")));
  const auto set = load();
  EXPECT_EQ(set->fingerprint(), expected) << "boxes of either have one label";
  EXPECT_THAT(set->class_names(), ElementsAre("car", "cat"));
  EXPECT_EQ(set->category_id(1), 20);
  ASSERT_THAT(set->remarks(), SizeIs(1));
  EXPECT_FALSE(set->remarks()[0].is_fault);
  EXPECT_THAT(set->remarks()[0].text,
              HasSubstr("categories with the same name: 'cat' (17, 20): they are one class"));
  write(file_of(kImages, R"("categories": [{"id": 0, "name": "cat"}, {"id": 3, "name": "car"},
      {"id": 17, "name": "cat"}, {"id": 9, "name": "car"}])"));
  EXPECT_THAT(load()->class_names(), ElementsAre("car", "cat"));
  EXPECT_EQ(load()->category_id(0), 9);
  EXPECT_EQ(load()->category_id(1), 17) << "category 0 is Roboflow's root";
  EXPECT_THAT(load()->remarks().at(0).text, HasSubstr("'car' (3, 9), 'cat' (0, 17): they are"));
}

/// As converters from YOLO write them.
TEST_F(CocoTest, RefusesBoxesInSharesOfTheImage) {
  const auto write_boxes = [&](const std::string& box, const std::string& other,
                               const std::string& images = kImages) {
    write(file_of(images, kCategories,
                  fmt::format(R"("annotations": [{{"id": 5, "image_id": 9, "category_id": 3,
                      "bbox": {}}}, {{"id": 6, "image_id": 9, "category_id": 3, "bbox": {}}}])",
                              box, other)));
  };
  for (const char* other : {"[0.5, 0.5, 0.5, 0.5]", "[0.9, 0.9, 1.0, 1.0]", "[0, 0, 0, 0]"}) {
    write_boxes("[0.1, 0.2, 0.3, 0.4]", other);
    for (const auto split : {Split::kTrain, Split::kHeldOut}) {
      EXPECT_THAT([&] { load(options(), split); },
                  ThrowsMessage<base::UserError>(
                      AllOf(HasSubstr("instances.json': all boxes (2) lie within the first pixel"),
                            HasSubstr("such as [0.1, 0.2, 0.3, 0.4] of annotation 5; boxes are in "
                                      "pixels, [x, y, width, height]: multiply x"))))
          << other;
    }
  }
  write_boxes("[0.1, 0.2, 0.3, 0.4]", "[0, 0, 1, 2]");
  EXPECT_EQ(load()->size(), 3) << "a box is larger";
  write_boxes("[0, 0, 1, 1]", "[0, 0, 1, 1]",
              R"("images": [{"id": 9, "file_name": "nine.jpg", "width": 1, "height": 1}])");
  EXPECT_EQ(load()->size(), 1) << "the image has one pixel";
}

TEST_F(CocoTest, WarnsOfBoxesBelowAPixel) {
  const std::string tiny =
      R"({"id": 5, "image_id": 9, "category_id": 3, "bbox": [10, 10, 0.4, 0.3]})";
  const auto remarks = [&](const std::string& other, int number = 1) {
    std::string boxes = tiny;
    for (int i = 0; i < number; ++i) {
      boxes += fmt::format(R"(, {{"image_id": 9, "category_id": 3, "id": {}, {}}})", i + 6, other);
    }
    write(file_of(kImages, kCategories, R"("annotations": [)" + boxes + "]"));
    return load()->remarks();
  };
  for (const auto& [other, count] : {std::pair(R"("bbox": [1, 1, 2, 2])", 1),
                                     {R"("bbox": [0.1, 0.1, 0.5, 0.5])", 2},
                                     {R"("bbox": [1, 1, 1, 0.5])", 1},
                                     {R"("bbox": [1, 1, 0.5, 0.5], "iscrowd": 1)", 1}}) {
    const auto found = remarks(other);
    ASSERT_THAT(found, SizeIs(1)) << other;
    EXPECT_FALSE(found[0].is_fault);
    EXPECT_THAT(found[0].text,
                HasSubstr(fmt::format(
                    "instances.json': {} of 2 boxes are less than a pixel wide and high, such as "
                    "[10, 10, 0.4, 0.3] of annotation 5; boxes are in pixels, [x, y, width, "
                    "height]. The network does not learn them",
                    count)));
  }
  EXPECT_THAT(remarks(R"("bbox": [1, 1, 2, 2])", 98), SizeIs(1));
  EXPECT_THAT(remarks(R"("bbox": [1, 1, 2, 2])", 99), SizeIs(0)) << "1 % of the boxes";
}

std::string with_four(const std::string& name, const std::string& size) {
  std::string images = kImages;
  const std::string four = R"("four.jpg", "width": 20, "height": 50)";
  images.replace(images.find(four), four.size(), fmt::format("\"{}\", {}", name, size));
  return file_of(images);
}

TEST_F(CocoTest, ReadsFilesInAndBelowTheFolderOnly) {
  const std::string size = R"("width": 20, "height": 50)";
  fs::create_directory(folder_ / "photos/below");
  fs::copy(folder_ / "photos/four.jpg", folder_ / "photos/below/four.jpg");
  fs::copy(folder_ / "photos/four.jpg", folder_ / "four.jpg");
  for (const std::string& name : {std::string("below/four.jpg"), std::string("below/../four.jpg"),
                                  (folder_ / "photos/four.jpg").string()}) {
    write(with_four(name, size));
    EXPECT_EQ(load()->get_batch(std::vector<int64_t>{0}).size(), 1) << name;
  }
  for (const std::string& name : {std::string("../four.jpg"), (folder_ / "four.jpg").string()}) {
    write(with_four(name, size));
    EXPECT_THAT([&] { load(); }, ThrowsMessage<base::UserError>(AllOf(
                                     HasSubstr(fmt::format("image 4, '{}', is not within", name)),
                                     HasSubstr("instances.json'"))));
  }
}

/// Batches have room for the largest image.
TEST_F(CocoTest, LeavesSizesThatNoFileMayHaveToTheLoader) {
  write(with_four("four.jpg", R"("width": 1000000000, "height": 1000000000)"));
  EXPECT_EQ(load()->sample_shape(), (std::vector<int64_t>{3, 30, 40}));
  EXPECT_THAT([this] { load()->get_batch(std::vector<int64_t>{0}); },
              ThrowsMessage<base::UserError>(HasSubstr("four.jpg' has 20 x 50 pixels, its")));
  write(with_four("four.jpg", R"("width": 4, "height": 2000000)"));
  EXPECT_THAT([this] { load(); },
              ThrowsMessage<base::UserError>(HasSubstr(
                  "coco: the transforms make images of up to 40 x 2000000 pixels, more than")));
}

TEST_F(CocoTest, NamesImagesThatDoNotMatch) {
  fs::remove(folder_ / "photos/seven.jpg");
  EXPECT_THAT([this] { load()->get_batch(std::vector<int64_t>{1}); },
              ThrowsMessage<base::UserError>(
                  AllOf(HasSubstr("photos/seven.jpg"), HasSubstr("No such file"))));
  folder_.write("photos/seven.jpg", test::write_jpeg(picture(30, 40)));
  EXPECT_THAT([this] { load()->get_batch(std::vector<int64_t>{1}); },
              ThrowsMessage<base::UserError>(
                  AllOf(HasSubstr("seven.jpg' has 30 x 40 pixels"), HasSubstr("for 40 x 30"))));
  fs::remove(folder_ / "photos/seven.jpg");
  const std::vector<Remark> remarks = load()->remarks();
  ASSERT_THAT(remarks, SizeIs(1));
  EXPECT_TRUE(remarks[0].is_fault);
  EXPECT_THAT(remarks[0].text, AllOf(HasSubstr("no file for 1 of 3 photos, such as '"),
                                     HasSubstr("photos/seven.jpg'; put the file there, or ")));
  EXPECT_THAT(remarks[0].unreadable, ElementsAre(Pair(load()->name_of(1), kMissingFile)));
  CocoOptions elsewhere = options();
  elsewhere.train_images = folder_ / "other";
  EXPECT_THAT([&] { load(elsewhere); },
              ThrowsMessage<base::UserError>(
                  AllOf(HasSubstr("other/four.jpg'"), HasSubstr("the folder of its images?"))));
}

TEST_F(CocoTest, SaysWhereAMissingFileIs) {
  const auto text = [&](const std::string& name) {
    write(with_four(name, R"("width": 20, "height": 50)"));
    return load()->remarks().at(0).text;
  };
  const std::string photos = folder_ / "photos";
  EXPECT_THAT(text("four.png"),
              HasSubstr(fmt::format("photos/four.png'; there is '{0}/four.jpg': correct the "
                                    "file_names, paths below '{0}'",
                                    photos)));
  // The last part of these names is that of a file in the folder.
  const std::string there = fmt::format("there is '{}/four.jpg': correct the file_names", photos);
  for (const char* name : {"photos/four.jpg", "https://example.com/a/four.jpg", "file:///four.jpg",
                           R"(C:\\photos\\four.jpg)"}) {
    EXPECT_THAT(text(name), HasSubstr("four.jpg'; " + there)) << name;
  }
  for (const char* name : {"/data/upload/3/four.jpg", "../four.jpg"}) {
    EXPECT_THAT([&] { text(name); },
                ThrowsMessage<base::UserError>(
                    AllOf(HasSubstr("image 4, '" + std::string(name) + "', is not within"),
                          HasSubstr("name a folder that holds all of them (" + there))));
  }
  folder_.write("photos/four.txt", "a label of YOLO");
  fs::create_directory(folder_ / "photos/val");
  fs::rename(folder_ / "photos/four.jpg", folder_ / "photos/val/four.jpg");
  EXPECT_THAT(text("four.jpg"),
              HasSubstr(fmt::format("four.jpg'; there is '{}/val/four.jpg': correct", photos)));
  EXPECT_THAT(text("none.jpg"), HasSubstr("none.jpg'; put the file there, or take the image out"));
}

TEST_F(CocoTest, AsksForTheFolderOfTheImagesIfMostAreMissing) {
  const auto refusal = [this](const std::string& name, const std::string& images,
                              const std::string& question) {
    write(file_of(
        fmt::format(R"("images": [{{"id": 9, "file_name": "{}", "width": 40, "height": 30}}])",
                    name),
        kCategories,
        R"("annotations": [{"image_id": 9, "category_id": 3, "bbox": [1, 1, 2, 2]}])"));
    CocoOptions asked = options();
    asked.train_images = folder_ / images;
    EXPECT_THAT([&] { load(asked); },
                ThrowsMessage<base::UserError>(
                    AllOf(HasSubstr("there is no file for 1 of 1 photo"), HasSubstr(question))));
  };
  const std::string root = folder_.path();
  const std::string photos = root + "/photos";
  refusal("nine.jpg", "", fmt::format("is '{}' the folder of its images?", photos));
  refusal("photos/nine.jpg", "photos", fmt::format("is '{}/' the folder of its images?", root));
  refusal(
      "none.jpg", "photos",
      fmt::format("is '{}' the folder of its images? Each file_name is a path below it", photos));
  refusal("https://example.com/nine.jpg", "photos",
          fmt::format("there is '{}/nine.jpg': correct the file_names", photos));
  fs::remove(folder_ / "photos/seven.jpg");
  fs::remove(folder_ / "photos/nine.jpg");
  write(file_of());
  EXPECT_THAT(load()->remarks().at(0).text, AllOf(HasSubstr("no file for 2 of 3 photos"),
                                                  HasSubstr("the folder of its images?")));
}

TEST_F(CocoTest, ReadsBackslashesAsSlashesWhereThatNamesAFile) {
  fs::create_directory(folder_ / "photos/below");
  const std::string size = R"("width": 20, "height": 50)";
  const auto name = [&](const char* file) {
    write(with_four(file, size));
    return load()->name_of(0);
  };
  fs::copy(folder_ / "photos/four.jpg", folder_ / "photos/below/4.jpg");
  EXPECT_EQ(name(R"(below\\4.jpg)"), (folder_ / "photos/below/4.jpg").string());
  EXPECT_THAT(load()->remarks(), SizeIs(0));
  // Folders are listed: the loader reports a link that leads nowhere.
  fs::create_symlink("nowhere", folder_ / "photos/below/5.jpg");
  EXPECT_EQ(name(R"(below\\5.jpg)"), (folder_ / "photos/below/5.jpg").string());
  EXPECT_THAT(load()->remarks(), SizeIs(0));
  EXPECT_THAT([&] { load()->get_batch(std::vector<int64_t>{0}); },
              ThrowsMessage<base::UserError>(HasSubstr("it is a link to 'nowhere', which does")));
  for (const char* path :
       {R"(.\\below\\4.jpg)", "./below/4.jpg", "below//4.jpg", "x/../below/4.jpg"}) {
    EXPECT_EQ(name(path), (folder_ / "photos/below/4.jpg").string()) << path;
  }
  fs::copy(folder_ / "photos/four.jpg", folder_ / R"(photos/below\4.jpg)");
  EXPECT_EQ(name(R"(below\\4.jpg)"), (folder_ / R"(photos/below\4.jpg)").string());

  for (const char* path : {R"(images\\four.jpg)", R"(C:\\images\\four.jpg)"}) {
    name(path);
    ASSERT_THAT(load()->remarks(), SizeIs(1));
    EXPECT_THAT(load()->remarks()[0].text,
                HasSubstr(fmt::format("images\\four.jpg'; there is '{}/four.jpg': correct",
                                      (folder_ / "photos").string())));
  }
  EXPECT_THAT([&] { name(R"(..\\four.jpg)"); },
              ThrowsMessage<base::UserError>(HasSubstr(R"('..\four.jpg', is not within)")));
}

/// A JPEG with an EXIF orientation.
std::string rotated(int64_t width, int64_t height, int orientation) {
  std::string exif(
      "\xff\xe1\0\x22"
      "Exif\0\0"
      "II*\0\x08\0\0\0"
      "\x01\0"
      "\x12\x01\x03\0\x01\0\0\0\0\0\0\0"
      "\0\0\0\0",
      36);
  exif[28] = static_cast<char>(orientation);
  return test::write_jpeg(picture(width, height)).insert(2, exif);
}

/// Photos that label tools have shown upright.
TEST_F(CocoTest, ReadsPhotosAsTheSizeInTheAnnotationsSays) {
  const auto pixels_of = [&](bool option) {
    CocoOptions read = options();
    read.exif_orientation = option;
    const auto set = load(read);
    const Batch batch = set->get_batch(std::vector<int64_t>{0});
    return batch.data[0].slice(1, 0, 50).slice(2, 0, 20).clone();
  };
  const auto image = [&](bool upright) {
    const Image read = load_image(folder_ / "photos/four.jpg", {.exif_orientation = upright});
    return at::tensor(at::ArrayRef<uint8_t>(read.pixels), at::kByte)
        .view({read.height, read.width, 3})
        .permute({2, 0, 1});
  };
  folder_.write("photos/four.jpg", rotated(50, 20, 6));
  EXPECT_TRUE(at::equal(pixels_of(false), image(true)));
  EXPECT_TRUE(at::equal(pixels_of(true), image(true)));
  folder_.write("photos/four.jpg", rotated(20, 50, 6));
  EXPECT_TRUE(at::equal(pixels_of(false), image(false)));
  EXPECT_TRUE(at::equal(pixels_of(true), image(false)));
  folder_.write("photos/four.jpg", rotated(20, 50, 3));
  EXPECT_TRUE(at::equal(pixels_of(false), image(false)));
  EXPECT_TRUE(at::equal(pixels_of(true), image(true)));
  folder_.write("photos/four.jpg", rotated(50, 20, 3));
  EXPECT_THAT([&] { pixels_of(false); },
              ThrowsMessage<base::UserError>(HasSubstr("four.jpg' has 50 x 20 pixels, its")));
}

TEST_F(CocoTest, FactsNameTheOrientationIfTheOptionWouldApplyIt) {
  const auto orientation = [&](const std::string& file, const std::string& size, bool option) {
    folder_.write("photos/four.jpg", file);
    write(with_four("four.jpg", size));
    CocoOptions read = options();
    read.exif_orientation = option;
    return load(read)->facts(0).orientation;
  };
  const std::string upright = R"("width": 20, "height": 50)";
  const std::string square = R"("width": 20, "height": 20)";
  EXPECT_EQ(orientation(test::write_jpeg(picture(20, 50)), upright, false), 1);
  // The size tells whether they are turned: the option would change nothing.
  EXPECT_EQ(orientation(rotated(50, 20, 6), upright, false), 1);
  EXPECT_EQ(orientation(rotated(20, 50, 8), upright, false), 1);
  EXPECT_EQ(orientation(rotated(20, 50, 3), upright, false), 3);
  EXPECT_EQ(orientation(rotated(20, 20, 6), square, false), 6);
  for (const int any : {3, 6}) EXPECT_EQ(orientation(rotated(20, 20, any), square, true), 1);
}

TEST_F(CocoTest, RefusesTransformsThatDoNotMoveBoxes) {
  CocoOptions augmented = options();
  augmented.transforms = {component("random_horizontal_flip"), component("rand_augment")};
  EXPECT_THAT([&] { load(augmented); },
              ThrowsMessage<base::UserError>(HasSubstr("rand_augment does not move boxes")));
  augmented.transforms = {component("resize", {{"size", "60"}})};
  EXPECT_THAT(
      [&] { load(augmented); },
      ThrowsMessage<base::UserError>(HasSubstr("coco: the transforms leave images of any size")));
}

TEST_F(CocoTest, RefusesTestTransformsThatDoMoreThanResize) {
  for (const char* type : {"center_crop", "random_horizontal_flip"}) {
    CocoOptions cropped = options();
    const auto size = component("resize", {{"height", "60"}, {"width", "60"}});
    cropped.test_transforms = {size};
    EXPECT_EQ(load(cropped, Split::kHeldOut)->size(), 3);
    cropped.test_transforms.push_back(
        type == std::string("center_crop") ? component(type, {{"size", "50"}}) : component(type));
    for (const auto split : {Split::kTrain, Split::kHeldOut}) {
      EXPECT_THAT(
          [&] { load(cropped, split); },
          ThrowsMessage<base::UserError>(AllOf(HasSubstr("coco: test_transforms has "),
                                               HasSubstr(type), HasSubstr("leave only resize"))));
    }
  }
}

std::string categories_of(const std::string& list) {
  return R"("categories": [)" + list + "]";
}

/// The classes are those of the training file, by name.
TEST_F(CocoTest, OtherSplitsMayLackCategories) {
  CocoOptions both = options();
  both.val_annotations = folder_ / "val.json";
  both.val_images = folder_ / "photos";
  const std::string car =
      R"("annotations": [{"image_id": 9, "category_id": 3, "bbox": [1, 1, 2, 2]}])";
  const std::string cat =
      R"("annotations": [{"image_id": 9, "category_id": 17, "bbox": [1, 1, 2, 2]}])";
  const std::string other_cat =
      R"("annotations": [{"image_id": 9, "category_id": 40, "bbox": [1, 1, 2, 2]}])";
  const std::string root = R"({"id": 0, "name": "animals"}, )";
  const std::string twin = R"({"id": 0, "name": "cat"}, )";
  for (const auto& [list, annotations, label] :
       std::vector<std::tuple<std::string, std::string, int>>{
           {R"({"id": 17, "name": "cat"}, {"id": 3, "name": "car"})", cat, 1},
           {R"({"id": 17, "name": "cat"})", cat, 1},
           {R"({"id": 3, "name": "car"})", car, 0},
           {R"({"id": 3, "name": "cat"})", car, 1},
           {R"({"id": 3, "name": "cat"}, {"id": 17, "name": "car"})", car, 1},
           {root + R"({"id": 17, "name": "cat"})", cat, 1},
           {twin + R"({"id": 17, "name": "cat"})", cat, 1},
           {R"({"id": 17, "name": "cat"}, {"id": 40, "name": "cat"})", other_cat, 1},
           {"", cat, 1}}) {
    folder_.write("val.json", file_of(kImages, categories_of(list), annotations));
    const auto set = load(both, Split::kVal);
    EXPECT_THAT(set->class_names(), ElementsAre("car", "cat")) << list;
    EXPECT_EQ(set->num_classes(), 2);
    EXPECT_THAT((std::vector{set->category_id(0), set->category_id(1)}), ElementsAre(3, 17));
    EXPECT_EQ(set->annotations(2)[0].label, label) << list;
  }
  folder_.write("val.json", file_of(kImages, categories_of(R"({"id": 3, "name": "Cat"})"), car));
  EXPECT_THAT([&] { load(both, Split::kVal); },
              ThrowsMessage<base::UserError>(
                  AllOf(HasSubstr("val.json' has boxes of categories that '"),
                        HasSubstr("instances.json' lacks: 'Cat'; rename or remove them (only the "
                                  "latter has 'car', 'cat'; "))));
  folder_.write("val.json", file_of(kImages, categories_of(""), R"("annotations": [])"));
  write(file_of(kImages, categories_of("")));
  const auto refusal = [&](const std::string& file) {
    EXPECT_THAT([&] { load(both, Split::kVal); },
                ThrowsMessage<base::UserError>(HasSubstr(file + "' has no categories")));
  };
  refusal("instances.json");
  fs::remove(folder_ / "instances.json");
  refusal("val.json");
}

/// Whether `action` opens this file.
bool opens(const fs::path& file, const std::function<void()>& action) {
  const base::UniqueFd events(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  EXPECT_GE(::inotify_add_watch(events.get(), file.c_str(), IN_OPEN), 0);
  action();
  alignas(inotify_event) std::array<char, 4096> buffer = {};
  return ::read(events.get(), buffer.data(), buffer.size()) > 0;
}

TEST_F(CocoTest, OtherSplitsReadTheTrainingFilesCategoriesOnce) {
  CocoOptions both = options();
  both.val_annotations = folder_.write("val.json", file_of(kImages, categories_of("")));
  both.val_images = folder_ / "photos";
  const auto classes = [&](bool opened) {
    std::vector<std::string> names;
    const auto read = [&] { names = load(both, Split::kVal)->class_names(); };
    EXPECT_EQ(opens(both.train_annotations, read), opened);
    return names;
  };
  EXPECT_THAT(classes(true), ElementsAre("car", "cat"));
  EXPECT_THAT(classes(false), ElementsAre("car", "cat"));
  // The training file of the same path has changed, or the path has.
  const std::string others = R"({"id": 3, "name": "ape"}, {"id": 17, "name": "bee"})";
  const std::string val = file_of(kImages, categories_of(""), R"("annotations": [])");
  folder_.write("val.json", val);
  write(file_of(kImages, categories_of(others)));
  EXPECT_THAT(classes(true), ElementsAre("ape", "bee"));
  EXPECT_THAT(classes(false), ElementsAre("ape", "bee"));
  both.train_annotations = folder_.write("other.json", file_of());
  EXPECT_THAT(classes(true), ElementsAre("car", "cat"));
  // A training split that was read leaves its categories.
  write(file_of(kImages, categories_of(others)));
  both.train_annotations = folder_ / "instances.json";
  load(both);
  EXPECT_THAT(classes(false), ElementsAre("ape", "bee"));
  // Faults in its other lists do not matter.
  write(file_of(R"("images": [{"id": 9, "file_name": "a", "width": 4, "height": 3},
                              {"id": 9, "file_name": "b", "width": 4}])",
                kCategories, R"("annotations": [{"id": 1}])"));
  EXPECT_THAT([&] { load(both); }, ThrowsMessage<base::UserError>(HasSubstr("image 9 has no")));
  EXPECT_THAT(classes(true), ElementsAre("car", "cat"));
  // Without a training file, a file's own categories count.
  folder_.write("val.json", file_of());
  fs::remove(folder_ / "instances.json");
  EXPECT_THAT(load(both, Split::kVal)->class_names(), ElementsAre("car", "cat"));
}

TEST_F(CocoTest, TakesImagesAndCategoriesThatAreListedTwiceOnce) {
  const auto merged = [&](const std::string& image, int64_t id) {
    std::string images = kImages, annotations = kAnnotations;
    images.insert(images.find('[') + 1, image);
    annotations.insert(annotations.find('[') + 1,
                       fmt::format(R"({{"image_id": {0}, "category_id": 17, "bbox": [1, 2, 3, 4]}},
            {{"image_id": {0}, "category_id": 3, "bbox": [2, 4, 8, 6]}},
            {{"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]}},
            {{"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]}}, )",
                                   id));
    write(file_of(images, categories_of(R"({"id": 17, "name": "cat"}, {"id": 3, "name": "car"},
        {"id": 17, "name": "cat"})"),
                  annotations));
    return load();
  };
  for (const auto& [id, name] : {std::pair(9, "nine.jpg"),
                                 {30, "nine.jpg"},
                                 {9, "./nine.jpg"},
                                 {30, ".//nine.jpg"},
                                 {30, "x/../nine.jpg"},
                                 {30, R"(.\\nine.jpg)"}}) {
    const auto set = merged(
        fmt::format(R"({{"id": {}, "file_name": "{}", "width": 40, "height": 30}},)", id, name),
        id);
    ASSERT_EQ(set->size(), 3) << name;
    EXPECT_THAT(set->class_names(), ElementsAre("car", "cat"));
    EXPECT_EQ(set->image_id(2), 9);
    // Three of its own, one of which the repetition has as well.
    EXPECT_THAT(set->annotations(2), SizeIs(4));
    EXPECT_THAT(set->annotations(1), SizeIs(2)) << "this image is listed once";
    ASSERT_THAT(set->remarks(), SizeIs(1));
    EXPECT_THAT(set->remarks()[0].text,
                HasSubstr("1 of 4 images repeat a file_name and size; each is taken once, and so "
                          "are its equal boxes (1 left out)"));
    EXPECT_FALSE(set->remarks()[0].is_fault);
  }
  EXPECT_THAT(
      [&] { merged(R"({"id": 9, "file_name": "nine.jpg", "width": 30, "height": 40},)", 9); },
      ThrowsMessage<base::UserError>(HasSubstr("two images with the id 9, 'nine.jpg' and 'nine")));
  fs::create_directory(folder_ / "photos/below");
  fs::rename(folder_ / "photos/four.jpg", folder_ / "photos/below/4.jpg");
  std::string file = with_four("below/4.jpg", R"("width": 20, "height": 50)");
  write(file.insert(file.find(R"({"id": 9, "file_name")"),
                    R"({"id": 2, "file_name": "below\\4.jpg", "width": 20, "height": 50}, )"));
  EXPECT_EQ(load()->size(), 3);
  EXPECT_EQ(load()->image_id(0), 2);
  EXPECT_THAT(load()->annotations(0), SizeIs(1)) << "that of image 4";
}

TEST_F(CocoTest, NamesPointersOfGitLfsInPlaceOfImages) {
  folder_.write("photos/four.jpg", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
  EXPECT_THAT([&] { load()->get_batch(std::vector<int64_t>{0}); },
              ThrowsMessage<base::UserError>(HasSubstr(
                  "four.jpg': it is a pointer of Git LFS, not the file: fetch it with `git lfs")));
}

TEST_F(CocoTest, FingerprintDependsOnTheAnnotations) {
  const uint64_t before = load()->fingerprint();
  EXPECT_EQ(load()->fingerprint(), before);
  std::string changed = file_of();
  changed.replace(changed.find("30.5, 10, 10.25"), 4, "30.6");
  write(changed);
  EXPECT_NE(load()->fingerprint(), before);
}

TEST_F(CocoTest, SplitsAreOptional) {
  EXPECT_EQ(load(options(), Split::kVal), nullptr);
  EXPECT_EQ(load(options(), Split::kTest), nullptr);
  EXPECT_EQ(load(options(), Split::kHeldOut)->size(), 3);
}

}  // namespace
}  // namespace syncbn::data
