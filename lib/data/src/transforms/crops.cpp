#include <syncbn/base/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "transforms/common.h"

namespace syncbn::data::detail {
namespace {

/// A transform whose results all have the same size.
class Crop : public BoxTransform {
 public:
  explicit Crop(ImageSize target) : target_(target) {}
  std::optional<ImageSize> size_after(std::optional<ImageSize>) const override { return target_; }

 protected:
  const ImageSize target_;
};

/// Pads smaller images with a black border.
class CenterCrop : public Crop {
 public:
  struct Options {
    std::optional<int64_t> size, height, width;

    static void describe(config::Schema<Options>& schema) {
      describe_size(schema, "side of the square that is cut from the middle");
    }
  };

  explicit CenterCrop(const Options& options) : Crop(target_size(options)) {}

  Box region(ImageSize size, SampleRandom&) const override {
    return {start(size.width, target_.width), start(size.height, target_.height),
            std::min(size.width, target_.width), std::min(size.height, target_.height)};
  }

  void apply(ImageSample& sample, SampleRandom&) const override {
    const int64_t missing_x = target_.width - sample.image.width;
    const int64_t missing_y = target_.height - sample.image.height;
    pad_sample(sample, {missing_x / 2, missing_y / 2, (missing_x + 1) / 2, (missing_y + 1) / 2}, 0);
  }

 private:
  static int64_t start(int64_t size, int64_t target) {
    return size > target ? rounded(static_cast<double>(size - target) / 2.0) : 0;
  }
};

class RandomCrop : public Crop {
 public:
  struct Options {
    std::optional<int64_t> size, height, width;
    int64_t padding = 0;
    bool pad_if_needed = false;
    int64_t fill = 0;

    static void describe(config::Schema<Options>& schema) {
      describe_size(schema, "side of the square that is cut out");
      schema.field("padding", &Options::padding, "border added on all sides before cropping")
          .between(0, kMaxSide)
          .unit("px");
      schema.field("pad_if_needed", &Options::pad_if_needed,
                   "add a border to images that are smaller than the crop");
      schema.field("fill", &Options::fill, "value of the border's pixels").between(0, 255);
    }
  };

  explicit RandomCrop(const Options& options) : Crop(target_size(options)), options_(options) {}

  Box region(ImageSize size, SampleRandom& random) const override {
    if (options_.padding > 0 || size.width < target_.width || size.height < target_.height) {
      return {0, 0, size.width, size.height};
    }
    return random_box(size, target_, random);
  }

  void apply(ImageSample& sample, SampleRandom& random) const override {
    const int64_t padding = options_.padding;
    if (padding == 0 && size_of(sample.image) == target_) return;
    pad_sample(sample, {padding, padding, padding, padding}, fill());
    const ImageSize size = size_of(sample.image);
    const int64_t missing_x = std::max<int64_t>(target_.width - size.width, 0);
    const int64_t missing_y = std::max<int64_t>(target_.height - size.height, 0);
    if ((missing_x > 0 || missing_y > 0) && !options_.pad_if_needed) {
      throw base::UserError(
          fmt::format("random_crop: {} x {} pixels cannot be cut from an image of {} x {}; resize "
                      "it before, or set pad_if_needed",
                      target_.width, target_.height, size.width, size.height));
    }
    pad_sample(sample, {missing_x, missing_y, missing_x, missing_y}, fill());
    crop_sample(sample, random_box(size_of(sample.image), target_, random));
  }

 private:
  uint8_t fill() const { return static_cast<uint8_t>(options_.fill); }

  const Options options_;
};

class RandomResizedCrop : public Crop {
 public:
  struct Options {
    std::optional<int64_t> size, height, width;
    std::vector<double> scale = {0.08, 1.0};
    std::vector<double> ratio = {3.0 / 4.0, 4.0 / 3.0};

    static void describe(config::Schema<Options>& schema) {
      describe_size(schema, "side of the square that the part is resized to");
      describe_range(schema, "scale", &Options::scale,
                     "smallest and largest share of the image's area")
          .positive_up_to(1);
      describe_range(schema, "ratio", &Options::ratio,
                     "smallest and largest width, as a multiple of the height")
          .above(0);
    }
  };

  explicit RandomResizedCrop(const Options& options)
      : Crop(target_size(options)), options_(options) {}

  Box region(ImageSize size, SampleRandom& random) const override {
    constexpr int kTries = 10;
    const auto area = static_cast<double>(size.width * size.height);
    for (int i = 0; i < kTries; ++i) {
      const auto [width, height] = random_sides(area, options_.scale, options_.ratio, random);
      if (width < 1 || width > size.width || height < 1 || height > size.height) continue;
      return random_box(size, {width, height}, random);
    }
    return middle(size);
  }

  void apply(ImageSample& sample, SampleRandom&) const override { resize_sample(sample, target_); }

 private:
  /// The largest centred part with an allowed ratio.
  Box middle(ImageSize size) const {
    const auto width = static_cast<double>(size.width);
    const auto height = static_cast<double>(size.height);
    ImageSize part = size;
    if (width / height < options_.ratio[0]) part.height = rounded(width / options_.ratio[0]);
    if (width / height > options_.ratio[1]) part.width = rounded(height * options_.ratio[1]);
    part = {std::clamp<int64_t>(part.width, 1, size.width),
            std::clamp<int64_t>(part.height, 1, size.height)};
    return {(size.width - part.width) / 2, (size.height - part.height) / 2, part.width,
            part.height};
  }

  const Options options_;
};

}  // namespace

void add_crops(TransformKind::Registry& registry) {
  add_transform<CenterCrop>(registry, "center_crop", "cut out the middle");
  add_transform<RandomCrop>(registry, "random_crop", "cut out a part of this size");
  add_transform<RandomResizedCrop>(registry, "random_resized_crop",
                                   "cut out a part of random size and resize it");
}

}  // namespace syncbn::data::detail
