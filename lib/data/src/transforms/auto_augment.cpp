#include <syncbn/data/image_ops.h>

#include <cmath>

#include "transforms/common.h"

namespace syncbn::data::detail {
namespace {

enum class Operation {
  kIdentity,
  kShearX,
  kShearY,
  kTranslateX,
  kTranslateY,
  kRotate,
  kBrightness,
  kColor,
  kContrast,
  kSharpness,
  kPosterize,
  kSolarize,
  kAutoContrast,
  kEqualize,
};
constexpr int64_t kOperations = 14;

/// The effect of each operation at the largest magnitude.
struct Reach {
  double shear;
  double translate_x;  ///< pixels
  double translate_y;
  double rotate;     ///< degrees
  double color;      ///< distance of the factors of brightness, saturation, etc. from 1
  double posterize;  ///< bits removed
};

/// torch.linspace(begin, end, count)[index], in float32.
double linspace(double begin, double end, int64_t count, int64_t index) {
  const auto first = static_cast<float>(begin);
  const auto last = static_cast<float>(end);
  const float step = (last - first) / static_cast<float>(count - 1);
  if (index < count / 2) return first + step * static_cast<float>(index);
  return last - step * static_cast<float>(count - 1 - index);
}

void warp(ImageSample& sample, const AffineMatrix& matrix) {
  sample.image = affine(sample.image, matrix, 0);
  if (sample.mask) sample.mask = affine(*sample.mask, matrix, sample.ignored_label);
}

void turn(ImageSample& sample, double degrees) {
  sample.image = rotate(sample.image, degrees, 0);
  if (sample.mask) sample.mask = rotate(*sample.mask, degrees, sample.ignored_label);
}

/// Runs operations at magnitude `index` of `bins`, with a random sign if the operation has one.
class Application {
 public:
  Application(const Reach& reach, int64_t bins, int64_t index)
      : reach_(reach), bins_(bins), index_(index) {}

  void run(Operation operation, ImageSample& sample, SampleRandom& random) const {
    switch (operation) {
      case Operation::kIdentity:
        return;
      case Operation::kShearX:
        return warp(sample, {1, signed_value(reach_.shear, random), 0, 0, 1, 0});
      case Operation::kShearY:
        return warp(sample, {1, 0, 0, signed_value(reach_.shear, random), 1, 0});
      case Operation::kTranslateX:
        return warp(sample, {1, 0, -std::trunc(signed_value(reach_.translate_x, random)), 0, 1, 0});
      case Operation::kTranslateY:
        return warp(sample, {1, 0, 0, 0, 1, -std::trunc(signed_value(reach_.translate_y, random))});
      case Operation::kRotate:
        return turn(sample, signed_value(reach_.rotate, random));
      case Operation::kBrightness:
        return adjust_brightness(sample.image, 1 + signed_value(reach_.color, random));
      case Operation::kColor:
        return adjust_saturation(sample.image, 1 + signed_value(reach_.color, random));
      case Operation::kContrast:
        return adjust_contrast(sample.image, 1 + signed_value(reach_.color, random));
      case Operation::kSharpness:
        return adjust_sharpness(sample.image, 1 + signed_value(reach_.color, random));
      case Operation::kPosterize:
        return posterize(sample.image, bits());
      case Operation::kSolarize:
        return solarize(sample.image, linspace(255, 0, bins_, index_));
      case Operation::kAutoContrast:
        return autocontrast(sample.image);
      case Operation::kEqualize:
        return equalize(sample.image);
    }
  }

 private:
  double signed_value(double reach, SampleRandom& random) const {
    const double value = linspace(0, reach, bins_, index_);
    return random.below(2) != 0 ? -value : value;
  }

  int bits() const {
    const double bins_a_bit = static_cast<double>(bins_ - 1) / reach_.posterize;
    return 8 - static_cast<int>(std::nearbyint(static_cast<double>(index_) / bins_a_bit));
  }

  const Reach& reach_;
  int64_t bins_;
  int64_t index_;
};

class RandAugment : public Transform {
 public:
  struct Options {
    int64_t num_ops = 2;
    int64_t magnitude = 9;
    int64_t num_magnitude_bins = 31;

    static void describe(config::Schema<Options>& schema) {
      schema.field("num_ops", &Options::num_ops, "number of operations in a row").at_least(0);
      schema.field("magnitude", &Options::magnitude, "of all operations, from 0").at_least(0);
      schema.field("num_magnitude_bins", &Options::num_magnitude_bins, "number of magnitudes")
          .at_least(2);
      schema.refuse("magnitude must be below num_magnitude_bins", [](const Options& options) {
        return options.magnitude >= options.num_magnitude_bins;
      });
    }
  };

  explicit RandAugment(const Options& options) : options_(options) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    // The same share of the side as in the paper, which translates by 150 of 331 pixels.
    const auto part = [](int64_t side) { return 150.0 / 331.0 * static_cast<double>(side); };
    const Reach reach{.shear = 0.3,
                      .translate_x = part(sample.image.width),
                      .translate_y = part(sample.image.height),
                      .rotate = 30,
                      .color = 0.9,
                      .posterize = 4};
    const Application application(reach, options_.num_magnitude_bins, options_.magnitude);
    for (int64_t i = 0; i < options_.num_ops; ++i) {
      application.run(static_cast<Operation>(random.below(kOperations)), sample, random);
    }
  }

 private:
  const Options options_;
};

class TrivialAugmentWide : public Transform {
 public:
  struct Options {
    int64_t num_magnitude_bins = 31;

    static void describe(config::Schema<Options>& schema) {
      schema.field("num_magnitude_bins", &Options::num_magnitude_bins, "number of magnitudes")
          .at_least(2);
    }
  };

  explicit TrivialAugmentWide(const Options& options) : bins_(options.num_magnitude_bins) {}

  void apply(ImageSample& sample, SampleRandom& random) const override {
    constexpr Reach kReach{.shear = 0.99,
                           .translate_x = 32,
                           .translate_y = 32,
                           .rotate = 135,
                           .color = 0.99,
                           .posterize = 6};
    const auto operation = static_cast<Operation>(random.below(kOperations));
    Application(kReach, bins_, random.below(bins_)).run(operation, sample, random);
  }

 private:
  const int64_t bins_;
};

}  // namespace

void add_auto_augment(TransformKind::Registry& registry) {
  add_transform<RandAugment>(registry, "rand_augment", "random operations of one magnitude");
  add_transform<TrivialAugmentWide>(registry, "trivial_augment_wide",
                                    "one random operation of random magnitude");
}

}  // namespace syncbn::data::detail
