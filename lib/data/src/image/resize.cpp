#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include <syncbn/base/error.h>
#include <syncbn/data/image_ops.h>

#include "resize_kernels.h"

namespace syncbn::data {
namespace {

using detail::kBeyondRow;
using detail::kWeightBits;
using detail::pixel_loops;
using detail::ResizeAxis;

/// Pillow's (int)(value + 0.5), for values that are not negative.
int64_t round_half_up(double value) {
  return static_cast<int64_t>(std::floor(value + 0.5));
}

/// The weights of Pillow's bilinear (triangle) filter, none negative: normalised to a sum of 1,
/// then rounded to fixed point.
ResizeAxis make_axis(int64_t in_size, int64_t out_size) {
  const double scale = static_cast<double>(in_size) / static_cast<double>(out_size);
  const double support = std::max(scale, 1.0);
  ResizeAxis axis;
  axis.taps = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  axis.weights.resize(static_cast<size_t>(out_size * axis.taps));
  std::vector<double> exact(static_cast<size_t>(axis.taps));
  const double inverse = 1.0 / support;
  for (int64_t i = 0; i < out_size; ++i) {
    const double center = (static_cast<double>(i) + 0.5) * scale;
    const auto first = std::max<int64_t>(round_half_up(center - support), 0);
    const auto end = std::min<int64_t>(round_half_up(center + support), in_size);
    const auto count = static_cast<size_t>(end - first);
    double sum = 0;
    for (size_t k = 0; k < count; ++k) {
      const double distance = static_cast<double>(k) + static_cast<double>(first) - center + 0.5;
      exact[k] = std::max(0.0, 1.0 - std::abs(distance * inverse));
      sum += exact[k];
    }
    int32_t* weights = axis.weights.data() + i * axis.taps;
    for (size_t k = 0; k < count; ++k) {
      const double share = sum != 0 ? exact[k] / sum : exact[k];
      weights[k] = static_cast<int32_t>(round_half_up(share * (1 << kWeightBits)));
    }
    axis.first.push_back(static_cast<int32_t>(first));
    axis.count.push_back(static_cast<int32_t>(count));
  }
  return axis;
}

/// Pads with zero weights to the same even count for all outputs, so that rgb_row() can compute
/// several at once. Returns `axis` unchanged if the input has fewer pixels than that count.
ResizeAxis evened_out(const ResizeAxis& axis, int64_t in_size) {
  const int32_t max_count = std::ranges::max(axis.count);
  const int32_t count = max_count + max_count % 2;
  if (count > in_size) return axis;
  ResizeAxis even{.taps = count,
                  .first = axis.first,
                  .count = std::vector<int32_t>(axis.count.size(), count),
                  .weights = std::vector<int32_t>(axis.count.size() * static_cast<size_t>(count)),
                  .is_even = true};
  for (size_t i = 0; i < even.first.size(); ++i) {
    even.first[i] = std::min(axis.first[i], static_cast<int32_t>(in_size) - count);
    const int32_t* weights = axis.weights.data() + static_cast<int64_t>(i) * axis.taps;
    const int64_t place = static_cast<int64_t>(i) * count + axis.first[i] - even.first[i];
    std::copy_n(weights, axis.count[i], even.weights.data() + place);
  }
  return even;
}

Image resize_rows(const Image& image, int64_t width) {
  const ResizeAxis axis = evened_out(make_axis(image.width, width), image.width);
  const auto row = image.channels == 3 ? pixel_loops().rgb_row : pixel_loops().grey_row;
  Image out(width, image.height, image.channels);
  for (int64_t y = 0; y + 1 < image.height; ++y) row(image.row(y), out.row(y), width, axis);
  // The loop reads beyond a row's end, so the last row needs a longer copy.
  const int64_t last = image.height - 1;
  std::vector<uint8_t> copy(static_cast<size_t>(image.row_bytes() + kBeyondRow));
  std::copy_n(image.row(last), image.row_bytes(), copy.data());
  row(copy.data(), out.row(last), width, axis);
  return out;
}

Image resize_columns(const Image& image, int64_t height) {
  const ResizeAxis axis = make_axis(image.height, height);
  Image out(image.width, height, image.channels);
  for (int64_t y = 0; y < height; ++y) {
    const auto at = static_cast<size_t>(y);
    pixel_loops().column(image.row(axis.first[at]), out.row(y), image.row_bytes(),
                         axis.weights.data() + y * axis.taps, axis.count[at]);
  }
  return out;
}

void check_target(const Image& image, int64_t width, int64_t height) {
  if (width >= 1 && height >= 1 && image.width >= 1 && image.height >= 1) return;
  throw base::InternalError(fmt::format("an image of {} x {} cannot be resized to {} x {}",
                                        image.width, image.height, width, height));
}

/// The source of each output pixel along one axis. Adds `scale` repeatedly, to round like Pillow.
std::vector<int64_t> nearest_places(int64_t in_size, int64_t out_size) {
  const double scale = static_cast<double>(in_size) / static_cast<double>(out_size);
  std::vector<int64_t> places;
  double at = scale * 0.5;
  for (int64_t i = 0; i < out_size; ++i, at += scale) {
    places.push_back(std::min(static_cast<int64_t>(at), in_size - 1));
  }
  return places;
}

}  // namespace

const detail::PixelLoops& detail::pixel_loops() {
  static const PixelLoops chosen = [] {
#ifdef SYNCBN_HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) return avx2::pixel_loops();
#endif
    return baseline::pixel_loops();
  }();
  return chosen;
}

Image resize(const Image& image, int64_t width, int64_t height) {
  check_target(image, width, height);
  if (width == image.width && height == image.height) return image;
  if (height == image.height) return resize_rows(image, width);
  if (width == image.width) return resize_columns(image, height);
  return resize_columns(resize_rows(image, width), height);
}

Image resize_nearest(const Image& image, int64_t width, int64_t height) {
  check_target(image, width, height);
  const auto columns = nearest_places(image.width, width);
  const auto rows = nearest_places(image.height, height);
  Image out(width, height, image.channels);
  uint8_t* to = out.pixels.data();
  for (const int64_t y : rows) {
    const uint8_t* row = image.row(y);
    for (const int64_t x : columns) to = std::copy_n(row + x * image.channels, image.channels, to);
  }
  return out;
}

}  // namespace syncbn::data
