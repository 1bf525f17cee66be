// Transforms of torchvision's references for detection. They also accept images without boxes.
#include <syncbn/data/image_ops.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "transforms/common.h"

namespace syncbn::data::detail {
namespace {

/// torchvision's int(side * ratio), but at least 1 pixel.
ImageSize scaled_by(ImageSize size, double ratio) {
  return {side_of(static_cast<double>(size.width) * ratio),
          side_of(static_cast<double>(size.height) * ratio)};
}

/// `to` / `from`, the factor by which a side changes.
double ratio_of(int64_t to, int64_t from) {
  return static_cast<double>(to) / static_cast<double>(from);
}

/// A share of a side, in pixels, rounded down.
int64_t part_of(int64_t side, double share) {
  return static_cast<int64_t>(static_cast<double>(side) * share);
}

class RandomShortestSize : public VaryingSize {
 public:
  struct Options {
    std::vector<int64_t> min_size;
    std::optional<int64_t> max_size;

    static void describe(config::Schema<Options>& schema) {
      schema
          .field("min_size", &Options::min_size,
                 "lengths of the shorter side, of which one is drawn")
          .required()
          .between(1, kMaxSide)
          .unit("px");
      schema
          .field("max_size", &Options::max_size,
                 "largest length of the longer side; if it would be longer, both sides are made "
                 "smaller")
          .between(1, kMaxSide)
          .unit("px");
      schema.refuse("min_size needs at least one length",
                    [](const Options& options) { return options.min_size.empty(); });
    }
  };

  explicit RandomShortestSize(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    const ImageSize size = size_of(sample.image);
    const auto& sides = options_.min_size;
    const auto drawn = static_cast<size_t>(random.below(std::ssize(sides)));
    const auto [smaller, larger] = std::minmax(size.width, size.height);
    double ratio = ratio_of(sides[drawn], smaller);
    if (options_.max_size) ratio = std::min(ratio, ratio_of(*options_.max_size, larger));
    resize_sample(sample, scaled_by(size, ratio));
  }

  std::optional<ImageSize> max_size_after(std::optional<ImageSize>) const override {
    if (!options_.max_size) return std::nullopt;
    return ImageSize{*options_.max_size, *options_.max_size};
  }

 private:
  const Options options_;
};

/// Large-scale jitter: Ghiasi et al., "Simple Copy-Paste is a Strong Data Augmentation Method for
/// Instance Segmentation", 2021.
class ScaleJitter : public VaryingSize {
 public:
  struct Options {
    std::vector<int64_t> target_size;
    std::vector<double> scale_range = {0.1, 2.0};

    static void describe(config::Schema<Options>& schema) {
      schema
          .field("target_size", &Options::target_size,
                 "width and height into which the image fits at a scale of 1")
          .required()
          .length(2)
          .between(1, kMaxSide)
          .unit("px");
      describe_range(schema, "scale_range", &Options::scale_range, "smallest and largest scale")
          .above(0);
    }
  };

  explicit ScaleJitter(const Options& options)
      : target_{options.target_size[0], options.target_size[1]}, range_(options.scale_range) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    const ImageSize size = size_of(sample.image);
    const double fit =
        std::min(ratio_of(target_.width, size.width), ratio_of(target_.height, size.height));
    resize_sample(sample, scaled_by(size, fit * random.uniform(range_[0], range_[1])));
  }

  std::optional<ImageSize> max_size_after(std::optional<ImageSize>) const override {
    return scaled_by(target_, range_[1]);
  }

 private:
  const ImageSize target_;
  const std::vector<double> range_;
};

/// Liu et al., "SSD: Single Shot MultiBox Detector", 2016, as in torchvision.
class RandomPhotometricDistort : public BoxTransform {
 public:
  struct Options {
    std::vector<double> brightness = {0.875, 1.125};
    std::vector<double> contrast = {0.5, 1.5};
    std::vector<double> saturation = {0.5, 1.5};
    std::vector<double> hue = {-0.05, 0.05};
    double p = 0.5;

    static void describe(config::Schema<Options>& schema) {
      const auto factor = [&](const char* name, std::vector<double> Options::*member) {
        describe_range(schema, name, member, "smallest and largest factor").at_least(0);
      };
      factor("brightness", &Options::brightness);
      factor("contrast", &Options::contrast);
      factor("saturation", &Options::saturation);
      describe_range(schema, "hue", &Options::hue,
                     "smallest and largest rotation of the colour circle, as a share of it")
          .between(-0.5, 0.5);
      schema.field("p", &Options::p, "probability of each change").between(0, 1);
    }
  };

  explicit RandomPhotometricDistort(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    Image& image = sample.image;
    const auto drawn = [&](const std::vector<double>& range) -> std::optional<double> {
      if (!random.chance(options_.p)) return std::nullopt;
      return random.uniform(range[0], range[1]);
    };
    const auto brightness = drawn(options_.brightness);
    const auto contrast = drawn(options_.contrast);
    const auto saturation = drawn(options_.saturation);
    const auto hue = drawn(options_.hue);
    const bool contrast_before = random.chance(0.5);
    if (brightness) adjust_brightness(image, *brightness);
    if (contrast && contrast_before) adjust_contrast(image, *contrast);
    if (saturation) adjust_saturation(image, *saturation);
    if (hue) adjust_hue(image, *hue);
    if (contrast && !contrast_before) adjust_contrast(image, *contrast);
    if (random.chance(options_.p)) permute_channels(image, random);
  }

 private:
  static void permute_channels(Image& image, SampleRandom& random) {
    if (image.channels == 1) return;
    const auto first = static_cast<size_t>(random.below(3));
    const size_t second = (first + 1 + static_cast<size_t>(random.below(2))) % 3;
    const std::array<size_t, 3> from = {first, second, 3 - first - second};
    for (size_t i = 0; i < image.pixels.size(); i += 3) {
      const std::array<uint8_t, 3> old = {image.pixels[i], image.pixels[i + 1],
                                          image.pixels[i + 2]};
      for (size_t c = 0; c < 3; ++c) image.pixels[i + c] = old[from[c]];
    }
  }

  const Options options_;
};

/// Puts the image at a random place of a larger one.
class RandomZoomOut : public VaryingSize {
 public:
  struct Options {
    int64_t fill = 0;
    std::vector<double> side_range = {1.0, 4.0};
    double p = 0.5;

    static void describe(config::Schema<Options>& schema) {
      schema.field("fill", &Options::fill, "value of the pixels around the image").between(0, 255);
      describe_range(schema, "side_range", &Options::side_range,
                     "smallest and largest factor by which the sides become longer")
          .at_least(1);
      schema.field("p", &Options::p, "probability").between(0, 1);
    }
  };

  explicit RandomZoomOut(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    if (!random.chance(options_.p)) return;
    const ImageSize size = size_of(sample.image);
    const auto& range = options_.side_range;
    const ImageSize canvas = scaled_by(size, random.uniform(range[0], range[1]));
    const int64_t left = part_of(canvas.width - size.width, random.uniform());
    const int64_t top = part_of(canvas.height - size.height, random.uniform());
    pad_sample(sample,
               {left, top, canvas.width - size.width - left, canvas.height - size.height - top},
               static_cast<uint8_t>(options_.fill));
  }

  std::optional<ImageSize> max_size_after(std::optional<ImageSize> before) const override {
    return before ? std::optional(scaled_by(*before, options_.side_range[1])) : std::nullopt;
  }

 private:
  const Options options_;
};

/// Crops so that the overlap (intersection over union) of a box and the crop is at least a randomly
/// drawn value (Liu et al., 2016). Removes boxes whose middle is outside the crop.
class RandomIouCrop : public VaryingSize {
 public:
  struct Options {
    double min_scale = 0.3;
    double max_scale = 1;
    double min_aspect_ratio = 0.5;
    double max_aspect_ratio = 2;
    std::vector<double> sampler_options = {0, 0.1, 0.3, 0.5, 0.7, 0.9, 1};
    int64_t trials = 40;

    static void describe(config::Schema<Options>& schema) {
      schema.field("min_scale", &Options::min_scale, "smallest share of each side")
          .positive_up_to(1);
      schema.field("max_scale", &Options::max_scale, "largest share of each side")
          .positive_up_to(1);
      schema
          .field("min_aspect_ratio", &Options::min_aspect_ratio,
                 "smallest width, as a multiple of the height")
          .above(0);
      schema
          .field("max_aspect_ratio", &Options::max_aspect_ratio,
                 "largest width, as a multiple of the height")
          .above(0);
      schema
          .field("sampler_options", &Options::sampler_options,
                 "smallest overlaps (intersection over union) of which one is drawn; 1: the "
                 "whole image")
          .at_least(0);
      schema
          .field("trials", &Options::trials, "crops that are tried before another overlap is drawn")
          .at_least(1);
      schema.check([](const Options& options) -> std::optional<std::string> {
        if (options.min_scale > options.max_scale ||
            options.min_aspect_ratio > options.max_aspect_ratio) {
          return "min_scale and min_aspect_ratio must not be above the largest values";
        }
        const bool can_end =
            std::ranges::any_of(options.sampler_options, [](double option) { return option >= 1; });
        if (can_end) return std::nullopt;
        return "sampler_options needs a 1, for images without a suitable crop";
      });
    }
  };

  explicit RandomIouCrop(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    const auto& overlaps = options_.sampler_options;
    while (true) {
      const double least = overlaps[static_cast<size_t>(random.below(std::ssize(overlaps)))];
      if (least >= 1) return;
      for (int64_t trial = 0; trial < options_.trials; ++trial) {
        const Box box = choose(size_of(sample.image), random);
        if (!suits(box, least, sample.boxes)) continue;
        std::erase_if(sample.boxes,
                      [&](const LabelledBox& object) { return !has_middle(box, object); });
        return crop_sample(sample, box);
      }
    }
  }

  std::optional<ImageSize> max_size_after(std::optional<ImageSize> before) const override {
    return before;
  }

 private:
  Box choose(ImageSize size, SampleRandom& random) const {
    const auto share = [&] { return random.uniform(options_.min_scale, options_.max_scale); };
    Box box;
    box.width = part_of(size.width, share());
    box.height = part_of(size.height, share());
    box.left = part_of(size.width - box.width, random.uniform());
    box.top = part_of(size.height - box.height, random.uniform());
    return box;
  }

  bool suits(const Box& box, double least, const std::vector<LabelledBox>& boxes) const {
    if (box.width == 0 || box.height == 0) return false;
    const double ratio = ratio_of(box.width, box.height);
    if (ratio < options_.min_aspect_ratio || ratio > options_.max_aspect_ratio) return false;
    return std::ranges::any_of(boxes, [&](const LabelledBox& object) {
      return has_middle(box, object) && overlap(box, object) >= least;
    });
  }

  static bool has_middle(const Box& box, const LabelledBox& object) {
    const double x = (object.x1 + object.x2) / 2 - static_cast<double>(box.left);
    const double y = (object.y1 + object.y2) / 2 - static_cast<double>(box.top);
    return x > 0 && x < static_cast<double>(box.width) && y > 0 &&
           y < static_cast<double>(box.height);
  }

  /// Intersection over union.
  static double overlap(const Box& box, const LabelledBox& object) {
    const auto left = static_cast<double>(box.left);
    const auto top = static_cast<double>(box.top);
    const auto width = static_cast<double>(box.width);
    const auto height = static_cast<double>(box.height);
    const double x = std::min(object.x2, left + width) - std::max(object.x1, left);
    const double y = std::min(object.y2, top + height) - std::max(object.y1, top);
    const double common = std::max(x, 0.0) * std::max(y, 0.0);
    const double area = (object.x2 - object.x1) * (object.y2 - object.y1);
    return common / (width * height + area - common);
  }

  const Options options_;
};

}  // namespace

void add_detection(TransformKind::Registry& registry) {
  add_transform<RandomShortestSize>(registry, "random_shortest_size",
                                    "resize the shorter side to a length drawn from a list");
  add_transform<ScaleJitter>(registry, "scale_jitter",
                             "resize to a random multiple of the size that fits a target");
  add_transform<RandomPhotometricDistort>(
      registry, "random_photometric_distort",
      "change brightness, contrast, saturation, hue and the order of channels, each at random");
  add_transform<RandomZoomOut>(registry, "random_zoom_out",
                               "put the image at a random place of a larger one");
  add_transform<RandomIouCrop>(registry, "random_iou_crop",
                               "cut out a part that overlaps a box by a random share");
}

}  // namespace syncbn::data::detail
