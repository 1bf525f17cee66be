#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/data/transforms.h>

namespace syncbn::data::detail {

void add_crops(TransformKind::Registry& registry);
void add_geometry(TransformKind::Registry& registry);
void add_detection(TransformKind::Registry& registry);
void add_colors(TransformKind::Registry& registry);
void add_auto_augment(TransformKind::Registry& registry);

/// A transform after which boxes still fit their objects.
class BoxTransform : public Transform {
 public:
  bool moves_boxes() const override { return true; }
};

/// A transform with results of different sizes.
class VaryingSize : public BoxTransform {
 public:
  std::optional<ImageSize> size_after(std::optional<ImageSize>) const override { return {}; }
};

/// Registers the class T, which has a struct T::Options.
template <class T>
void add_transform(TransformKind::Registry& registry, const char* name, const char* help) {
  using Options = typename T::Options;
  registry.add<Options>(name, help,
                        [](const Options& options) { return std::make_shared<const T>(options); });
}

inline ImageSize size_of(const Image& image) {
  return {image.width, image.height};
}

/// @param what begins the message, which ends with the size
/// @throws base::UserError if an image of this size has more than `max_pixels`
void check_pixels(const std::string& what, ImageSize size, int64_t max_pixels);

/// Crops image and mask, and clips boxes.
void crop_sample(ImageSample& sample, const Box& box);

/// Adds a border of `fill` to the image and of ignored pixels to the mask.
/// @param border left, top, width and height: pixels to add at the left, top, right and bottom
/// @throws base::UserError if the result has more than the sample's max_pixels
void pad_sample(ImageSample& sample, const Box& border, uint8_t fill);

/// Resizes the image (bilinear) and the mask (nearest neighbour).
/// @throws base::UserError if the result, or what resizing only the rows makes, has more than the
///   sample's max_pixels
void resize_sample(ImageSample& sample, ImageSize size);

/// The length of a side in pixels: at least 1, and at most more than any image may have.
int64_t side_of(double length);

/// Python's round(): rounds halves to the even neighbour.
int64_t rounded(double value);

/// The sides of a random rectangle. Its share of `area` is uniform in `scale`; the ratio of its
/// first to its second side is log-uniform in `ratio`.
std::pair<int64_t, int64_t> random_sides(double area, const std::vector<double>& scale,
                                         const std::vector<double>& ratio, SampleRandom& random);

/// A part of this size at a random place of an image.
Box random_box(ImageSize image, ImageSize part, SampleRandom& random);

constexpr int64_t kMaxSide = 65'500;  // pixels; the limit of libjpeg

/// Describes the members size, height and width: users give size (of a square) or the other two.
template <class Options>
void describe_size(config::Schema<Options>& schema, const std::string& size_help) {
  schema.field("size", &Options::size, size_help).between(1, kMaxSide).unit("px");
  schema.field("height", &Options::height, "together with width, instead of size")
      .between(1, kMaxSide)
      .unit("px");
  schema.field("width", &Options::width, "together with height, instead of size")
      .between(1, kMaxSide)
      .unit("px");
  schema.refuse("needs either size, or height and width", [](const Options& options) {
    return options.size ? options.height || options.width : !options.height || !options.width;
  });
}

/// Describes a member that holds a smallest and a largest value.
template <class Options>
config::Rules& describe_range(config::Schema<Options>& schema, const char* name,
                              std::vector<double> Options::*member, const char* help) {
  schema.refuse(std::string(name) + " has a smallest and a largest value, in this order",
                [member](const Options& options) {
                  return (options.*member).front() > (options.*member).back();
                });
  return schema.field(name, member, help).length(2);
}

template <class Options>
ImageSize target_size(const Options& options) {
  return {options.size ? *options.size : *options.width,
          options.size ? *options.size : *options.height};
}

}  // namespace syncbn::data::detail
