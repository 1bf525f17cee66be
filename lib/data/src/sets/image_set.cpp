#include "sets/image_set.h"

#include <fmt/format.h>

#include <algorithm>

#include <syncbn/base/error.h>
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

}  // namespace

ImageSet::ImageSet(const std::string& kind, const ImageSetOptions& options, Split split,
                   int64_t channels, std::optional<ImageSize> stored)
    : pipeline_(split == Split::kTrain ? options.transforms : options.test_transforms),
      channels_(channels),
      normalization_{per_channel(kind, "mean", options.mean, channels),
                     per_channel(kind, "std", options.std, channels)} {
  const auto size = pipeline_.size(stored);
  if (!size) {
    throw base::UserError(fmt::format(
        "{}: the {} do not make all images the same size; add {}", kind,
        split == Split::kTrain ? "transforms" : "test_transforms",
        split == Split::kTrain ? "random_resized_crop or random_crop" : "resize and center_crop"));
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

}  // namespace syncbn::data::detail
