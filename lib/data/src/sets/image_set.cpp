#include "sets/image_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "image/resize_kernels.h"
#include "transforms/common.h"

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

/// A name and, beyond ASCII, its bytes: 'café' (caf\xc3\xa9).
std::string spelled(const std::string& name) {
  std::string bytes;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    bytes += byte < 0x80 ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  return fmt::format("'{}'{}", base::printable(name), bytes == name ? "" : " (" + bytes + ")");
}

}  // namespace

ImageFormat::ImageFormat(const std::string& kind, const ImageSetOptions& options, Split split,
                         const Source& source)
    : pipeline_(split == Split::kTrain ? options.transforms : options.test_transforms,
                source.has_boxes, source.max_pixels),
      channels_(source.channels),
      normalization_{per_channel(kind, "mean", options.mean, channels_),
                     per_channel(kind, "std", options.std, channels_)} {
  auto size = pipeline_.size(source.size);
  if (!size && source.may_vary) {
    sizes_vary_ = true;
    size = pipeline_.max_size(source.max_size);
  }
  if (!size) {
    const bool is_train = split == Split::kTrain;
    throw base::UserError(fmt::format(
        "{}: the {} {}", kind, is_train ? "transforms" : "test_transforms",
        source.may_vary ? "leave images of any size; add resize with max_size, or a crop"
        : is_train ? "do not make all images the same size; add random_resized_crop or random_crop"
                   : "do not make all images the same size; add resize and center_crop"));
  }
  size_ = *size;
  check_pixels(kind + ": the transforms make images of up to", size_, source.max_pixels);
}

void ImageFormat::write(const Image& image, const SampleSlot& slot) const {
  const bool fits = sizes_vary_ ? image.width <= size_.width && image.height <= size_.height
                                : ImageSize{image.width, image.height} == size_;
  if (!fits || image.channels != channels_) {
    throw base::InternalError(
        fmt::format("transforms made an image of {} x {} x {} instead of {}{} x {} x {}",
                    image.channels, image.height, image.width, sizes_vary_ ? "at most " : "",
                    channels_, size_.height, size_.width));
  }
  if (sizes_vary_) {
    slot.size[0] = image.height;
    slot.size[1] = image.width;
  }
  const int64_t plane = size_.height * size_.width;
  for (int64_t y = 0; y < image.height; ++y) {
    uint8_t* const out = slot.data.data() + y * size_.width;
    if (channels_ == 3) {
      pixel_loops().rgb_planes(image.row(y), image.width, out, plane);
    } else {
      std::copy_n(image.row(y), image.width, out);
    }
  }
}

void ImageFormat::write_mask(const Image& mask, const SampleSlot& slot) const {
  for (int64_t y = 0; y < mask.height; ++y) {
    std::copy_n(mask.row(y), mask.width, slot.target.data() + y * size_.width);
  }
}

const std::string& of_split(Split split, const std::string& train, const std::string& val,
                            const std::string& test) {
  if (split == Split::kVal) return val;
  return split == Split::kTest ? test : train;
}

const config::Component<TransformKind>* first_but_resize(
    const std::vector<config::Component<TransformKind>>& steps) {
  const auto found =
      std::ranges::find_if(steps, [](const auto& step) { return step.type() != "resize"; });
  return found == steps.end() ? nullptr : &*found;
}

void check_classes(const std::string& subject, const std::set<std::string>& own,
                   const std::string& train, const std::set<std::string>& trained) {
  const auto only_in = [](const auto& some, const auto& others) {
    constexpr size_t kShown = 5;
    std::vector<std::string> names;
    std::ranges::set_difference(some, others, std::back_inserter(names));
    std::ranges::transform(names, names.begin(), &spelled);
    return base::join_some(std::move(names), ", ", kShown);
  };
  const std::string unknown = only_in(own, trained);
  if (unknown.empty()) return;
  const std::string missing = only_in(trained, own);
  throw base::UserError(fmt::format(
      "{} that '{}' lacks: {}; rename or remove them ({}names that look alike differ in case, "
      "spaces or Unicode normalisation)",
      subject, train, unknown, missing.empty() ? "" : "only the latter has " + missing + "; "));
}

DecodeOptions decode_options(const ImageFileOptions& options) {
  return {.exif_orientation = options.exif_orientation,
          .max_pixels = options.max_pixels,
          .max_scans = static_cast<int>(options.max_scans),
          .clamp_high_bits = options.high_bits == "clamp"};
}

}  // namespace syncbn::data::detail
