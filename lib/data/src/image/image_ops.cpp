#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include <syncbn/data/image_ops.h>

namespace syncbn::data {
namespace {

using Histogram = std::array<int64_t, 256>;
using Table = std::array<uint8_t, 256>;

uint8_t clipped(double value) {
  return static_cast<uint8_t>(std::clamp(value, 0.0, 255.0));
}

/// ITU-R 601-2's luma in 16-bit fixed point, Pillow's mode "L".
uint8_t grey_of(const uint8_t* rgb, int64_t channels) {
  if (channels == 1) return rgb[0];
  return static_cast<uint8_t>((rgb[0] * 19595 + rgb[1] * 38470 + rgb[2] * 7471 + 0x8000) >> 16);
}

/// Image.blend, in float32: `other` for factor 0, `value` for factor 1.
uint8_t blended(int other, int value, float factor) {
  const float mixed = static_cast<float>(other) + factor * static_cast<float>(value - other);
  return mixed <= 0 ? 0 : mixed >= 255 ? 255 : static_cast<uint8_t>(mixed);
}

size_t stride_of(const Image& image) {
  return static_cast<size_t>(image.channels);
}

/// Blends all channels of a pixel with the grey other(pixel).
template <class Other>
void blend_with_grey(Image& image, double factor, const Other& other) {
  const auto share = static_cast<float>(factor);
  for (size_t i = 0; i < image.pixels.size(); i += stride_of(image)) {
    uint8_t* pixel = &image.pixels[i];
    const int grey = other(pixel);
    for (int64_t c = 0; c < image.channels; ++c) pixel[c] = blended(grey, pixel[c], share);
  }
}

template <class Function>
void map_values(Image& image, const Function& function) {
  Table table;
  for (int value = 0; value < 256; ++value) table[static_cast<size_t>(value)] = function(value);
  for (uint8_t& value : image.pixels) value = table[value];
}

/// Maps each channel by the table of its histogram.
void map_channels(Image& image, Table (*table_of)(const Histogram&)) {
  for (size_t channel = 0; channel < stride_of(image); ++channel) {
    Histogram histogram{};
    auto& pixels = image.pixels;
    for (size_t i = channel; i < pixels.size(); i += stride_of(image)) ++histogram[pixels[i]];
    const Table table = table_of(histogram);
    for (size_t i = channel; i < pixels.size(); i += stride_of(image)) pixels[i] = table[pixels[i]];
  }
}

Table identity() {
  Table table;
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint8_t>(i);
  return table;
}

Table stretching(const Histogram& histogram) {
  const auto used = [](int64_t count) { return count != 0; };
  const auto low = std::ranges::find_if(histogram, used) - histogram.begin();
  const auto high =
      255 - (std::find_if(histogram.rbegin(), histogram.rend(), used) - histogram.rbegin());
  if (high <= low) return identity();
  const double scale = 255.0 / static_cast<double>(high - low);
  const double offset = static_cast<double>(-low) * scale;
  Table table;
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = clipped(std::trunc(static_cast<double>(i) * scale + offset));
  }
  return table;
}

Table equalizing(const Histogram& histogram) {
  int64_t sum = 0;
  int64_t last = 0;
  int64_t used = 0;
  for (const int64_t count : histogram) {
    if (count == 0) continue;
    sum += count;
    last = count;
    ++used;
  }
  const int64_t step = (sum - last) / 255;
  if (used <= 1 || step == 0) return identity();
  Table table;
  int64_t below = step / 2;
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = static_cast<uint8_t>(std::min<int64_t>(below / step, 255));
    below += histogram[i];
  }
  return table;
}

struct Hsv {
  uint8_t hue;
  uint8_t saturation;
  uint8_t value;
};

/// Pillow's conversion, which mixes float and double.
Hsv to_hsv(const uint8_t* rgb) {
  const uint8_t max = std::max({rgb[0], rgb[1], rgb[2]});
  const uint8_t min = std::min({rgb[0], rgb[1], rgb[2]});
  if (max == min) return {0, 0, max};
  const auto range = static_cast<float>(max - min);
  const float saturation = range / static_cast<float>(max);
  const float red = static_cast<float>(max - rgb[0]) / range;
  const float green = static_cast<float>(max - rgb[1]) / range;
  const float blue = static_cast<float>(max - rgb[2]) / range;
  float hue = 0;
  if (rgb[0] == max) {
    hue = blue - green;
  } else if (rgb[1] == max) {
    hue = static_cast<float>(2.0 + static_cast<double>(red) - static_cast<double>(blue));
  } else {
    hue = static_cast<float>(4.0 + static_cast<double>(green) - static_cast<double>(red));
  }
  hue = static_cast<float>(std::fmod(static_cast<double>(hue) / 6.0 + 1.0, 1.0));
  return {clipped(static_cast<double>(hue) * 255.0),
          clipped(static_cast<double>(saturation) * 255.0), max};
}

void to_rgb(const Hsv& hsv, uint8_t* rgb) {
  const double value = hsv.value;
  const float saturation = static_cast<float>(hsv.saturation) / 255.0F;
  const double share = saturation;
  const double sixths = static_cast<double>(hsv.hue) * 6.0 / 255.0;
  const int sector = static_cast<int>(std::floor(sixths));
  const double within = static_cast<float>(sixths - sector);
  const uint8_t v = hsv.value;
  const uint8_t p = clipped(std::round(value * (1.0 - share)));
  const uint8_t q =
      clipped(std::round(value * (1.0 - static_cast<double>(static_cast<float>(share * within)))));
  const uint8_t t = clipped(std::round(value * (1.0 - share * (1.0 - within))));
  const std::array<std::array<uint8_t, 3>, 6> sectors = {
      {{v, t, p}, {q, v, p}, {p, v, t}, {p, q, v}, {t, p, v}, {v, p, q}}};
  std::ranges::copy(sectors[static_cast<size_t>(sector % 6)], rgb);
}

/// ImageFilter.SMOOTH: weights 1/13, and 5/13 in the middle. The border is unchanged.
Image smoothed(const Image& image) {
  constexpr float kSide = 1.0F / 13;
  constexpr float kMiddle = 5.0F / 13;
  const int64_t next = image.channels;
  Image out = image;
  for (int64_t y = 1; y + 1 < image.height; ++y) {
    for (int64_t i = next; i + next < image.row_bytes(); ++i) {
      float sum = 0.5F;
      for (const int64_t row : {y + 1, y, y - 1}) {
        const uint8_t* at = image.row(row) + i;
        const float middle = row == y ? kMiddle : kSide;
        sum += static_cast<float>(at[-next]) * kSide + static_cast<float>(at[0]) * middle +
               static_cast<float>(at[next]) * kSide;
      }
      out.row(y)[i] = clipped(static_cast<double>(sum));
    }
  }
  return out;
}

/// Pillow steps through the source in 16.16 fixed point.
int64_t fixed(double value) {
  return static_cast<int64_t>(std::floor(value * 65536.0 + 0.5));
}

/// Rounded to 15 decimals, so that the cosine of a quarter turn is 0.
double rounded(double value) {
  return std::round(value * 1e15) / 1e15;
}

}  // namespace

Image crop(const Image& image, const Box& box) {
  Image out(box.width, box.height, image.channels);
  for (int64_t y = 0; y < box.height; ++y) {
    std::copy_n(image.row(box.top + y) + box.left * image.channels, out.row_bytes(), out.row(y));
  }
  return out;
}

Image pad(const Image& image, int64_t left, int64_t top, int64_t right, int64_t bottom,
          uint8_t value) {
  Image out(left + image.width + right, top + image.height + bottom, image.channels);
  std::ranges::fill(out.pixels, value);
  for (int64_t y = 0; y < image.height; ++y) {
    std::copy_n(image.row(y), image.row_bytes(), out.row(top + y) + left * image.channels);
  }
  return out;
}

void flip_horizontally(Image& image) {
  for (int64_t y = 0; y < image.height; ++y) {
    uint8_t* left = image.row(y);
    uint8_t* right = left + image.row_bytes() - image.channels;
    for (; left < right; left += image.channels, right -= image.channels) {
      std::swap_ranges(left, left + image.channels, right);
    }
  }
}

void flip_vertically(Image& image) {
  for (int64_t y = 0; y < image.height / 2; ++y) {
    std::swap_ranges(image.row(y), image.row(y) + image.row_bytes(),
                     image.row(image.height - 1 - y));
  }
}

Image affine(const Image& image, const AffineMatrix& matrix, uint8_t fill) {
  Image out(image.width, image.height, image.channels);
  std::ranges::fill(out.pixels, fill);
  int64_t row_x = fixed(matrix[2] + matrix[0] * 0.5 + matrix[1] * 0.5);
  int64_t row_y = fixed(matrix[5] + matrix[3] * 0.5 + matrix[4] * 0.5);
  for (int64_t y = 0; y < out.height; ++y) {
    int64_t at_x = row_x;
    int64_t at_y = row_y;
    for (int64_t x = 0; x < out.width; ++x) {
      const int64_t from_x = at_x >> 16;
      const int64_t from_y = at_y >> 16;
      if (from_x >= 0 && from_x < image.width && from_y >= 0 && from_y < image.height) {
        std::copy_n(image.row(from_y) + from_x * image.channels, image.channels,
                    out.row(y) + x * image.channels);
      }
      at_x += fixed(matrix[0]);
      at_y += fixed(matrix[3]);
    }
    row_x += fixed(matrix[1]);
    row_y += fixed(matrix[4]);
  }
  return out;
}

Image rotate(const Image& image, double degrees, uint8_t fill) {
  double turn = std::fmod(degrees, 360.0);
  if (turn < 0) turn += 360.0;
  const double radians = -turn * (std::numbers::pi / 180.0);
  const double cosine = rounded(std::cos(radians));
  const double sine = rounded(std::sin(radians));
  const double x = static_cast<double>(image.width) / 2;
  const double y = static_cast<double>(image.height) / 2;
  return affine(
      image,
      {cosine, sine, cosine * -x + sine * -y + x, -sine, cosine, -sine * -x + cosine * -y + y},
      fill);
}

void adjust_brightness(Image& image, double factor) {
  blend_with_grey(image, factor, [](const uint8_t*) { return 0; });
}

void adjust_contrast(Image& image, double factor) {
  double sum = 0;
  for (size_t i = 0; i < image.pixels.size(); i += stride_of(image)) {
    sum += grey_of(&image.pixels[i], image.channels);
  }
  const double mean = sum / static_cast<double>(image.width * image.height);
  blend_with_grey(image, factor, [grey = static_cast<int>(std::floor(mean + 0.5))](const uint8_t*) {
    return grey;
  });
}

void adjust_saturation(Image& image, double factor) {
  blend_with_grey(image, factor,
                  [&image](const uint8_t* pixel) { return int{grey_of(pixel, image.channels)}; });
}

void adjust_hue(Image& image, double factor) {
  if (image.channels == 1) return;  // grey has no hue
  const auto shift = static_cast<uint8_t>(static_cast<int>(factor * 255));
  for (size_t i = 0; i < image.pixels.size(); i += stride_of(image)) {
    Hsv hsv = to_hsv(&image.pixels[i]);
    hsv.hue = static_cast<uint8_t>(hsv.hue + shift);
    to_rgb(hsv, &image.pixels[i]);
  }
}

void adjust_sharpness(Image& image, double factor) {
  const Image other = smoothed(image);
  for (size_t i = 0; i < image.pixels.size(); ++i) {
    image.pixels[i] = blended(other.pixels[i], image.pixels[i], static_cast<float>(factor));
  }
}

void posterize(Image& image, int bits) {
  const int mask = 0xff & ~((1 << (8 - bits)) - 1);
  map_values(image, [mask](int value) { return static_cast<uint8_t>(value & mask); });
}

void solarize(Image& image, double threshold) {
  map_values(image, [threshold](int value) {
    return static_cast<uint8_t>(value < threshold ? value : 255 - value);
  });
}

void autocontrast(Image& image) {
  map_channels(image, stretching);
}

void equalize(Image& image) {
  map_channels(image, equalizing);
}

}  // namespace syncbn::data
