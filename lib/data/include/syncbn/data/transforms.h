#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <syncbn/config/schema.h>
#include <syncbn/data/image.h>
#include <syncbn/data/random.h>

namespace syncbn::data {

/// A box around an object; corners in pixels from the upper left corner of the image.
struct LabelledBox {
  double x1 = 0;
  double y1 = 0;
  double x2 = 0;
  double y2 = 0;
  int64_t label = 0;

  bool operator==(const LabelledBox&) const = default;
};

/// An image with the labels of its pixels (segmentation) or its boxes (detection).
/// Geometric transforms change all of them (masks by nearest neighbour), colour transforms only the
/// image.
struct ImageSample {
  Image image;
  std::optional<Image> mask = {};
  /// The mask's label for pixels outside of the image.
  uint8_t ignored_label = 255;
  /// Transforms refuse to make a larger image, before they allocate memory for it.
  int64_t max_pixels = DecodeOptions{}.max_pixels;
  /// Crops clip boxes to the image, so some may have no area.
  std::vector<LabelledBox> boxes = {};
};

/// A step from a decoded image to a training sample. Thread-safe.
class Transform {
 public:
  virtual ~Transform() = default;

  /// The part of the image that apply() needs, by default all of it. Pipeline::run() with a decoder
  /// decodes only the first transform's region.
  virtual Box region(ImageSize size, SampleRandom& random) const;

  /// Changes a sample that has been cropped to region().
  virtual void apply(ImageSample& sample, SampleRandom& random) const = 0;

  /// The size of the result, if it follows from the options and `before`.
  virtual std::optional<ImageSize> size_after(std::optional<ImageSize> before) const {
    return before;
  }

  /// The largest width and height of a result, if the options bound them for images up to the size
  /// `before`. Transforms that can enlarge an image override this.
  virtual std::optional<ImageSize> max_size_after(std::optional<ImageSize> before) const {
    return size_after(before);
  }

  /// Whether apply() moves boxes with the image. If not, Pipeline refuses it for samples with
  /// boxes.
  virtual bool moves_boxes() const { return false; }
};

/// The registry behind lists of transforms such as `- {type: random_resized_crop, size: 224}`.
/// Names, options, defaults and distributions of random choices are those of
/// torchvision.transforms. Image operations give the same bytes as Pillow.
///   resize, center_crop, random_crop, random_resized_crop, random_horizontal_flip,
///   random_vertical_flip, random_scale, random_shortest_size, scale_jitter, random_zoom_out,
///   random_iou_crop, color_jitter, random_photometric_distort, rand_augment,
///   trivial_augment_wide, random_erasing
struct TransformKind {
  using Registry = config::Registry<std::shared_ptr<const Transform>>;
  static Registry& registry();
};

/// A sequence of transforms.
class Pipeline {
 public:
  Pipeline() = default;
  explicit Pipeline(std::vector<std::shared_ptr<const Transform>> steps);
  /// @param has_boxes samples will have boxes
  /// @param max_pixels ImageSample::max_pixels of all samples
  /// @throws base::UserError if `has_boxes` and a transform does not move boxes.
  explicit Pipeline(const std::vector<config::Component<TransformKind>>& steps,
                    bool has_boxes = false, int64_t max_pixels = DecodeOptions{}.max_pixels);

  /// Decodes the part of the image that the first step needs, and runs all steps.
  /// @throws base::UserError for an image that a step cannot transform, without the file's name
  Image run(ImageDecoder& decoder, SampleRandom& random) const;

  /// Runs all steps on an image and its mask, which must have the same size.
  ImageSample run(ImageSample sample, SampleRandom& random) const;

  /// The size of the results, if it is the same for all images (or all images of size `before`).
  std::optional<ImageSize> size(std::optional<ImageSize> before = {}) const;

  /// The largest width and height of the results, if they are bounded (for images up to the size
  /// `before`, if given).
  std::optional<ImageSize> max_size(std::optional<ImageSize> before = {}) const;

 private:
  void run_from(size_t first, ImageSample& sample, SampleRandom& random) const;

  std::vector<std::shared_ptr<const Transform>> steps_;
  int64_t max_pixels_ = DecodeOptions{}.max_pixels;
};

}  // namespace syncbn::data
