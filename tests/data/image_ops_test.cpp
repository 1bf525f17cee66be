#include <syncbn/data/image_ops.h>

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <syncbn/base/error.h>

#include "data/images.h"
#include "data/jpeg_writer.h"

namespace syncbn::data {
namespace {

using test::picture;
using Arguments = std::vector<double>;

/// The first channel of a grey RGB image.
Image grey_of(const Image& rgb) {
  Image grey(rgb.width, rgb.height, 1);
  for (size_t i = 0; i < grey.pixels.size(); ++i) grey.pixels[i] = rgb.pixels[3 * i];
  return grey;
}

int64_t whole(double value) {
  return static_cast<int64_t>(value);
}

/// Turns an operation that changes its argument into one that returns the result.
template <class Change>
auto changing(const Change& change) {
  return [change](Image image, const Arguments& arguments) {
    change(image, arguments);
    return image;
  };
}

using Operation = std::function<Image(const Image&, const Arguments&)>;

std::map<std::string, Operation> operations() {
  using A = const Arguments&;
  return {
      {"resize", [](const Image& i, A a) { return resize(i, whole(a[0]), whole(a[1])); }},
      {"mask_resize",
       [](const Image& i, A a) { return resize_nearest(i, whole(a[0]), whole(a[1])); }},
      {"brightness", changing([](Image& i, A a) { adjust_brightness(i, a[0]); })},
      {"contrast", changing([](Image& i, A a) { adjust_contrast(i, a[0]); })},
      {"saturation", changing([](Image& i, A a) { adjust_saturation(i, a[0]); })},
      {"sharpness", changing([](Image& i, A a) { adjust_sharpness(i, a[0]); })},
      {"hue", changing([](Image& i, A a) { adjust_hue(i, a[0]); })},
      {"posterize", changing([](Image& i, A a) { posterize(i, static_cast<int>(a[0])); })},
      {"solarize", changing([](Image& i, A a) { solarize(i, a[0]); })},
      {"autocontrast", changing([](Image& i, A) { autocontrast(i); })},
      {"equalize", changing([](Image& i, A) { equalize(i); })},
      {"rotate", [](const Image& i, A a) { return rotate(i, a[0], 0); }},
      {"affine",
       [](const Image& i, A a) {
         return affine(i, {a[0], a[1], a[2], a[3], a[4], a[5]}, 0);
       }},
  };
}

TEST(ImageOpsTest, MatchPillowByteForByte) {
  const auto known = operations();
  const Image rgb = load_image(test::kImages / "jpeg_420.jpg");
  const Image grey = grey_of(load_image(test::kImages / "jpeg_grey.jpg"));
  std::ifstream file(test::kImages / "operations.txt");
  std::map<std::string, int> calls;
  for (std::string line; std::getline(file, line);) {
    const size_t equals = line.find(" = ");
    std::istringstream call(line.substr(0, equals));
    std::string name;
    call >> name;
    Arguments arguments;
    for (double value = 0; call >> value;) arguments.push_back(value);
    const bool is_grey = name.starts_with("grey_") || name == "mask_resize";
    if (name.starts_with("grey_")) name = name.substr(5);
    const Image result = known.at(name)(is_grey ? grey : rgb, arguments);
    EXPECT_EQ(test::hash_of(result), line.substr(equals + 3)) << line;
    ++calls[name];
  }
  EXPECT_EQ(calls.size(), known.size());
  EXPECT_EQ(calls["resize"], 98);
}

TEST(ImageOpsTest, CropFlipAndPadOnlyMovePixels) {
  const Image image = picture(5, 4);
  Image mirrored = image;
  flip_horizontally(mirrored);
  Image upside_down = image;
  flip_vertically(upside_down);
  const Image padded = pad(image, 1, 2, 3, 4, 9);
  EXPECT_EQ(padded.width, 9);
  EXPECT_EQ(padded.height, 10);
  EXPECT_EQ(crop(padded, {1, 2, 5, 4}), image);
  const auto at = [](const Image& from, int64_t x, int64_t y) { return from.row(y)[3 * x]; };
  for (int64_t y = 0; y < 4; ++y) {
    for (int64_t x = 0; x < 5; ++x) {
      EXPECT_EQ(at(mirrored, x, y), at(image, 4 - x, y));
      EXPECT_EQ(at(upside_down, x, y), at(image, x, 3 - y));
    }
  }
  for (const auto& [x, y] : {std::pair{0, 5}, {8, 5}, {4, 1}, {4, 6}}) {
    EXPECT_EQ(at(padded, x, y), 9) << x << ", " << y;
  }
}

TEST(ImageOpsTest, RefusesToResizeToNothing) {
  EXPECT_THROW(resize(picture(3, 3), 0, 2), base::InternalError);
  EXPECT_THROW(resize_nearest(picture(3, 3), 2, -1), base::InternalError);
}

}  // namespace
}  // namespace syncbn::data
