#include <syncbn/data/image_ops.h>

#include <algorithm>
#include <array>
#include <utility>

#include "transforms/common.h"

namespace syncbn::data::detail {
namespace {

/// The four changes in random order, without those whose option is 0.
class ColorJitter : public BoxTransform {
 public:
  struct Options {
    double brightness = 0;
    double contrast = 0;
    double saturation = 0;
    double hue = 0;

    static void describe(config::Schema<Options>& schema) {
      constexpr const char* kFactor = "factor is 1 - this to 1 + this";
      schema.field("brightness", &Options::brightness, kFactor).at_least(0);
      schema.field("contrast", &Options::contrast, kFactor).at_least(0);
      schema.field("saturation", &Options::saturation, kFactor).at_least(0);
      schema
          .field("hue", &Options::hue,
                 "rotation of the colour circle is -this to this, as a share of it")
          .between(0, 0.5);
    }
  };

  explicit ColorJitter(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    std::array<int, 4> order = {0, 1, 2, 3};
    for (size_t left = order.size(); left > 1; --left) {
      std::swap(order[left - 1],
                order[static_cast<size_t>(random.below(static_cast<int64_t>(left)))]);
    }
    const double brightness = factor(options_.brightness, random);
    const double contrast = factor(options_.contrast, random);
    const double saturation = factor(options_.saturation, random);
    const double hue = random.uniform(-options_.hue, options_.hue);
    for (const int which : order) {
      if (which == 0 && options_.brightness > 0) adjust_brightness(sample.image, brightness);
      if (which == 1 && options_.contrast > 0) adjust_contrast(sample.image, contrast);
      if (which == 2 && options_.saturation > 0) adjust_saturation(sample.image, saturation);
      if (which == 3 && options_.hue > 0) adjust_hue(sample.image, hue);
    }
  }

 private:
  static double factor(double spread, SampleRandom& random) {
    return random.uniform(std::max(0.0, 1 - spread), 1 + spread);
  }

  const Options options_;
};

}  // namespace

void add_colors(TransformKind::Registry& registry) {
  add_transform<ColorJitter>(registry, "color_jitter",
                             "change brightness, contrast, saturation and hue at random");
}

}  // namespace syncbn::data::detail
