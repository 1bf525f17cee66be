#include <syncbn/data/image_ops.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "transforms/common.h"

namespace syncbn::data::detail {
namespace {

class Resize : public BoxTransform {
 public:
  struct Options {
    std::optional<int64_t> size, height, width, max_size;

    static void describe(config::Schema<Options>& schema) {
      describe_size(schema, "the shorter side's new length; the other keeps the proportion");
      schema
          .field("max_size", &Options::max_size,
                 "with size: largest length of the longer side; if it would be longer, both sides "
                 "are made smaller")
          .at_most(kMaxSide)
          .unit("px");
      schema.refuse("max_size goes with size, and must be above it", [](const Options& options) {
        return options.max_size && (!options.size || *options.max_size <= *options.size);
      });
    }
  };

  explicit Resize(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom&) const override {
    resize_sample(sample, target(size_of(sample.image)));
  }

  std::optional<ImageSize> size_after(std::optional<ImageSize> before) const override {
    if (before) return target(*before);
    return options_.size ? std::nullopt : std::optional(target_size(options_));
  }

  std::optional<ImageSize> max_size_after(std::optional<ImageSize>) const override {
    if (!options_.size) return target_size(options_);
    if (!options_.max_size) return std::nullopt;
    return ImageSize{*options_.max_size, *options_.max_size};
  }

 private:
  ImageSize target(ImageSize size) const {
    if (!options_.size) return target_size(options_);
    const auto [smaller, larger] = std::minmax(size.width, size.height);
    // torchvision: int(side * long / short).
    int64_t shorter = *options_.size;
    int64_t longer = shorter * larger / smaller;
    if (options_.max_size && longer > *options_.max_size) {
      shorter = std::max<int64_t>(*options_.max_size * shorter / longer, 1);
      longer = *options_.max_size;
    }
    if (size.width <= size.height) return {shorter, longer};
    return {longer, shorter};
  }

  const Options options_;
};

/// Mirrors two opposite sides of a box, where the image's side is `length`.
void mirror(double& low, double& high, int64_t length) {
  std::swap(low, high);
  low = static_cast<double>(length) - low;
  high = static_cast<double>(length) - high;
}

void mirror_x(LabelledBox& box, const Image& image) {
  mirror(box.x1, box.x2, image.width);
}

void mirror_y(LabelledBox& box, const Image& image) {
  mirror(box.y1, box.y2, image.height);
}

template <void (*flip)(Image&), void (*mirror_box)(LabelledBox&, const Image&)>
class Flip : public BoxTransform {
 public:
  struct Options {
    double p = 0.5;

    static void describe(config::Schema<Options>& schema) {
      schema.field("p", &Options::p, "probability").between(0, 1);
    }
  };

  explicit Flip(const Options& options) : p_(options.p) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    if (!random.chance(p_)) return;
    flip(sample.image);
    if (sample.mask) flip(*sample.mask);
    for (LabelledBox& box : sample.boxes) mirror_box(box, sample.image);
  }

 private:
  const double p_;
};

class RandomScale : public VaryingSize {
 public:
  struct Options {
    double min = 0.5;
    double max = 2.0;

    static void describe(config::Schema<Options>& schema) {
      schema.field("min", &Options::min, "smallest factor of both sides").above(0);
      schema.field("max", &Options::max, "largest factor of both sides").above(0);
      schema.refuse("min must not be above max",
                    [](const Options& options) { return options.min > options.max; });
    }
  };

  explicit RandomScale(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    resize_sample(sample,
                  scaled(size_of(sample.image), random.uniform(options_.min, options_.max)));
  }

  std::optional<ImageSize> max_size_after(std::optional<ImageSize> before) const override {
    return before ? std::optional(scaled(*before, options_.max)) : std::nullopt;
  }

 private:
  static ImageSize scaled(ImageSize size, double factor) {
    const auto side = [factor](int64_t old) {
      return side_of(std::round(static_cast<double>(old) * factor));
    };
    return {side(size.width), side(size.height)};
  }

  const Options options_;
};

/// Changes only the image; mask and boxes stay, as in torchvision.
class RandomErasing : public BoxTransform {
 public:
  struct Options {
    double p = 0.5;
    std::vector<double> scale = {0.02, 0.33};
    std::vector<double> ratio = {0.3, 3.3};
    int64_t value = 0;

    static void describe(config::Schema<Options>& schema) {
      schema.field("p", &Options::p, "probability").between(0, 1);
      schema.field("scale", &Options::scale, "smallest and largest share of the area")
          .length(2)
          .between(0, 1);
      schema
          .field("ratio", &Options::ratio,
                 "smallest and largest height, as a multiple of the width")
          .length(2)
          .above(0);
      schema.field("value", &Options::value, "value of erased pixels").between(0, 255);
    }
  };

  explicit RandomErasing(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    constexpr int kTries = 10;
    if (!random.chance(options_.p)) return;
    Image& image = sample.image;
    for (int i = 0; i < kTries; ++i) {
      const auto [height, width] = random_sides(static_cast<double>(image.width * image.height),
                                                options_.scale, options_.ratio, random);
      if (height >= image.height || width >= image.width) continue;
      const Box box = random_box(size_of(image), {width, height}, random);
      for (int64_t y = box.top; y < box.top + height; ++y) {
        std::fill_n(image.row(y) + box.left * image.channels, width * image.channels,
                    static_cast<uint8_t>(options_.value));
      }
      return;
    }
  }

 private:
  const Options options_;
};

}  // namespace

void add_geometry(TransformKind::Registry& registry) {
  add_transform<Resize>(registry, "resize", "resize, bilinear and anti-aliased");
  add_transform<Flip<flip_horizontally, mirror_x>>(registry, "random_horizontal_flip",
                                                   "mirror left and right");
  add_transform<Flip<flip_vertically, mirror_y>>(registry, "random_vertical_flip",
                                                 "mirror top and bottom");
  add_transform<RandomScale>(registry, "random_scale", "resize by a random factor");
  add_transform<RandomErasing>(registry, "random_erasing", "erase a random rectangle");
}

}  // namespace syncbn::data::detail
