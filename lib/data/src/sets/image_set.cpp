#include "sets/image_set.h"

#include <fmt/format.h>

#include <algorithm>

#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/text.h>

#include "image/resize_kernels.h"

namespace syncbn::data::detail {
namespace {

std::vector<double> per_channel(const std::string& kind, const char* key,
                                std::vector<double> values, int64_t channels) {
  if (values.size() == 1) values.resize(static_cast<size_t>(channels), values.front());
  if (std::ssize(values) == channels) return values;
  throw base::UserError(fmt::format("{}: {} has {}, the images have {}", kind, key,
                                    base::counted(values.size(), "value"),
                                    base::counted(channels, "channel")));
}

class MemorySet : public ImageSet {
 public:
  MemorySet(const std::string& kind, const ImageSetOptions& options, Split split,
            StoredImages images)
      : ImageSet(kind, options, split, images.channels, images.size), images_(std::move(images)) {
    base::Fnv1a hash;
    for (const uint8_t value : images_.pixels) hash.add_byte(value);
    for (const int64_t label : images_.labels) hash.add(static_cast<uint64_t>(label));
    fingerprint_ = hash.value();
  }

  int64_t size() const override { return std::ssize(images_.labels); }
  std::span<const int64_t> labels() const override { return images_.labels; }
  int64_t num_classes() const override { return images_.classes; }
  uint64_t fingerprint() const override { return fingerprint_; }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    Image image(images_.size.width, images_.size.height, images_.channels);
    std::copy_n(images_.pixels.data() + index * std::ssize(image.pixels), image.pixels.size(),
                image.pixels.data());
    put(pipeline().run({std::move(image), std::nullopt}, random).image, slot.data);
    slot.target[0] = images_.labels[static_cast<size_t>(index)];
  }

 private:
  StoredImages images_;
  uint64_t fingerprint_ = 0;
};

}  // namespace

ImageSet::ImageSet(const std::string& kind, const ImageSetOptions& options, Split split,
                   int64_t channels, std::optional<ImageSize> stored)
    : pipeline_(split == Split::kTest ? options.test_transforms : options.transforms),
      channels_(channels),
      normalization_{per_channel(kind, "mean", options.mean, channels),
                     per_channel(kind, "std", options.std, channels)} {
  const auto size = pipeline_.size(stored);
  if (!size) {
    throw base::UserError(fmt::format(
        "{}: the {} do not make all images the same size; add {}", kind,
        split == Split::kTest ? "test_transforms" : "transforms",
        split == Split::kTest ? "resize and center_crop" : "random_resized_crop or random_crop"));
  }
  size_ = *size;
}

std::vector<int64_t> ImageSet::sample_shape() const {
  return {channels_, size_.height, size_.width};
}

void ImageSet::put(const Image& image, std::span<uint8_t> out) const {
  if (ImageSize{image.width, image.height} != size_ || image.channels != channels_) {
    throw base::InternalError(fmt::format(
        "transforms made an image of {} x {} x {} instead of {} x {} x {}", image.channels,
        image.height, image.width, channels_, size_.height, size_.width));
  }
  if (channels_ == 3) {
    pixel_loops().rgb_planes(image.pixels.data(), image.width * image.height, out.data());
  } else {
    std::ranges::copy(image.pixels, out.begin());
  }
}

DecodeOptions decode_options(const ImageFileOptions& options) {
  return {.exif_orientation = options.exif_orientation,
          .max_pixels = options.max_pixels,
          .max_scans = static_cast<int>(options.max_scans)};
}

std::shared_ptr<const Dataset> make_memory_set(const std::string& kind,
                                               const ImageSetOptions& options, Split split,
                                               StoredImages images) {
  return std::make_shared<const MemorySet>(kind, options, split, std::move(images));
}

}  // namespace syncbn::data::detail
