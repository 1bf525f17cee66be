#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <syncbn/config/schema.h>
#include <syncbn/data/image.h>
#include <syncbn/data/random.h>

namespace syncbn::data {

/// What is transformed together: an image and, in segmentation, the labels of its pixels, of the
/// same size. Geometry is applied to both (masks by nearest neighbour), colours to the image alone.
struct ImageSample {
  Image image;
  std::optional<Image> mask;
  /// The label of pixels that come from outside the image.
  uint8_t ignored_label = 255;
};

struct ImageSize {
  int64_t width = 0;
  int64_t height = 0;

  bool operator==(const ImageSize&) const = default;
};

/// One step from a decoded image to a training sample. Immutable: may be used from any thread.
class Transform {
 public:
  virtual ~Transform() = default;

  /// The part of an image that apply() is to be given; the whole by default. Crops choose it here,
  /// so that a first crop decides what is decoded at all.
  virtual Box region(ImageSize size, SampleRandom& random) const;

  /// Changes a sample that has been cropped to region().
  virtual void apply(ImageSample& sample, SampleRandom& random) const = 0;

  /// The size after it, where that follows from the options or from a known size before.
  virtual std::optional<ImageSize> size_after(std::optional<ImageSize> before) const {
    return before;
  }
};

/// The registry behind lists of transforms such as `- {type: random_resized_crop, size: 224}`.
/// Names, options and defaults are torchvision.transforms'; each image operation's bytes are
/// Pillow's, and the random choices are distributed as torchvision's, drawn from SampleRandom.
///   resize, center_crop, random_crop, random_resized_crop, random_horizontal_flip,
///   random_vertical_flip, random_scale, color_jitter, rand_augment, trivial_augment_wide,
///   random_erasing
struct TransformKind {
  using Registry = config::Registry<std::shared_ptr<const Transform>>;
  static Registry& registry();
};

/// Transforms one after the other.
class Pipeline {
 public:
  Pipeline() = default;
  explicit Pipeline(std::vector<std::shared_ptr<const Transform>> steps);
  explicit Pipeline(const std::vector<config::Component<TransformKind>>& steps);

  /// Decodes of the image what the first step needs, and runs all of them.
  Image run(ImageDecoder& decoder, SampleRandom& random) const;

  /// The same on an image and its mask; they must have the same size.
  ImageSample run(ImageSample sample, SampleRandom& random) const;

  /// Of the results, when it is the same for all images, or all images have size `before`.
  std::optional<ImageSize> size(std::optional<ImageSize> before = {}) const;

 private:
  void run_from(size_t first, ImageSample& sample, SampleRandom& random) const;

  std::vector<std::shared_ptr<const Transform>> steps_;
};

}  // namespace syncbn::data
