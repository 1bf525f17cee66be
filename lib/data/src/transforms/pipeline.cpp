#include <syncbn/base/error.h>
#include <syncbn/data/image_ops.h>
#include <syncbn/data/transforms.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "transforms/common.h"

namespace syncbn::data {
namespace detail {
namespace {

/// Call it before memory for a result of this size is allocated.
void check_result(const ImageSample& sample, ImageSize size) {
  check_pixels(fmt::format("a transform of {} x {} pixels would make", sample.image.width,
                           sample.image.height),
               size, sample.max_pixels);
}

/// Changes the sides of all boxes by a function of x and one of y.
template <class X, class Y>
void map_boxes(ImageSample& sample, const X& x, const Y& y) {
  for (LabelledBox& box : sample.boxes) {
    box = {.x1 = x(box.x1), .y1 = y(box.y1), .x2 = x(box.x2), .y2 = y(box.y2), .label = box.label};
  }
}

}  // namespace

void check_pixels(const std::string& what, ImageSize size, int64_t max_pixels) {
  if (size.width <= max_pixels / std::max<int64_t>(size.height, 1)) return;
  throw base::UserError(fmt::format(
      "{} {} x {} pixels, more than max_pixels, {}; bound the size (resize has max_size), or raise "
      "max_pixels if you trust the files",
      what, size.width, size.height, max_pixels));
}

void crop_sample(ImageSample& sample, const Box& box) {
  if (box == Box{0, 0, sample.image.width, sample.image.height}) return;
  sample.image = crop(sample.image, box);
  if (sample.mask) sample.mask = crop(*sample.mask, box);
  const auto clipped = [](double value, int64_t start, int64_t size) {
    return std::clamp(value - static_cast<double>(start), 0.0, static_cast<double>(size));
  };
  map_boxes(
      sample, [&](double x) { return clipped(x, box.left, box.width); },
      [&](double y) { return clipped(y, box.top, box.height); });
}

void pad_sample(ImageSample& sample, const Box& border, uint8_t fill) {
  const auto& [left, top, right, bottom] = border;
  if (border == Box{}) return;
  check_result(sample, {left + sample.image.width + right, top + sample.image.height + bottom});
  sample.image = pad(sample.image, left, top, right, bottom, fill);
  if (sample.mask) sample.mask = pad(*sample.mask, left, top, right, bottom, sample.ignored_label);
  const auto moved_by = [](int64_t pixels) {
    return [pixels](double at) { return at + static_cast<double>(pixels); };
  };
  map_boxes(sample, moved_by(left), moved_by(top));
}

void resize_sample(ImageSample& sample, ImageSize size) {
  // resize() resizes the rows first.
  check_result(sample, {size.width, std::max(size.height, sample.image.height)});
  const auto scaled_by = [](int64_t to, int64_t from) {
    const double ratio = static_cast<double>(to) / static_cast<double>(from);
    return [ratio](double at) { return at * ratio; };
  };
  map_boxes(sample, scaled_by(size.width, sample.image.width),
            scaled_by(size.height, sample.image.height));
  sample.image = resize(sample.image, size.width, size.height);
  if (sample.mask) sample.mask = resize_nearest(*sample.mask, size.width, size.height);
}

int64_t side_of(double length) {
  constexpr double kLongest = 1e12;
  return static_cast<int64_t>(std::clamp(length, 1.0, kLongest));
}

int64_t rounded(double value) {
  return static_cast<int64_t>(std::nearbyint(value));
}

std::pair<int64_t, int64_t> random_sides(double area, const std::vector<double>& scale,
                                         const std::vector<double>& ratio, SampleRandom& random) {
  const double part = area * random.uniform(scale[0], scale[1]);
  const double proportion = std::exp(random.uniform(std::log(ratio[0]), std::log(ratio[1])));
  return {rounded(std::sqrt(part * proportion)), rounded(std::sqrt(part / proportion))};
}

Box random_box(ImageSize image, ImageSize part, SampleRandom& random) {
  const int64_t top = random.below(image.height - part.height + 1);
  const int64_t left = random.below(image.width - part.width + 1);
  return {left, top, part.width, part.height};
}

}  // namespace detail

Box Transform::region(ImageSize size, SampleRandom&) const {
  return {0, 0, size.width, size.height};
}

TransformKind::Registry& TransformKind::registry() {
  static Registry registry("transform",
                           {detail::add_crops, detail::add_geometry, detail::add_detection,
                            detail::add_colors, detail::add_auto_augment});
  return registry;
}

Pipeline::Pipeline(std::vector<std::shared_ptr<const Transform>> steps)
    : steps_(std::move(steps)) {}

Pipeline::Pipeline(const std::vector<config::Component<TransformKind>>& steps, bool has_boxes,
                   int64_t max_pixels)
    : max_pixels_(max_pixels) {
  for (const auto& step : steps) {
    steps_.push_back(step.make());
    if (!has_boxes || steps_.back()->moves_boxes()) continue;
    throw base::UserError(
        fmt::format("the transform {} does not move boxes with the image; remove it", step.type()));
  }
}

Image Pipeline::run(ImageDecoder& decoder, SampleRandom& random) const {
  if (steps_.empty()) return decoder.decode();
  const Box box = steps_.front()->region({decoder.width(), decoder.height()}, random);
  ImageSample sample{.image = decoder.decode(box), .max_pixels = max_pixels_};
  steps_.front()->apply(sample, random);
  run_from(1, sample, random);
  return std::move(sample.image);
}

ImageSample Pipeline::run(ImageSample sample, SampleRandom& random) const {
  if (sample.mask && detail::size_of(*sample.mask) != detail::size_of(sample.image)) {
    throw base::UserError(fmt::format("the image has {} x {} pixels and its mask {} x {}",
                                      sample.image.width, sample.image.height, sample.mask->width,
                                      sample.mask->height));
  }
  sample.max_pixels = max_pixels_;
  run_from(0, sample, random);
  return sample;
}

std::optional<ImageSize> Pipeline::size(std::optional<ImageSize> before) const {
  for (const auto& step : steps_) before = step->size_after(before);
  return before;
}

std::optional<ImageSize> Pipeline::max_size(std::optional<ImageSize> before) const {
  for (const auto& step : steps_) before = step->max_size_after(before);
  return before;
}

void Pipeline::run_from(size_t first, ImageSample& sample, SampleRandom& random) const {
  for (size_t i = first; i < steps_.size(); ++i) {
    detail::crop_sample(sample, steps_[i]->region(detail::size_of(sample.image), random));
    steps_[i]->apply(sample, random);
  }
}

}  // namespace syncbn::data
