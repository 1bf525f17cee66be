#include <algorithm>
#include <cmath>
#include <numbers>

#include <syncbn/data/image_ops.h>

namespace syncbn::data {
namespace {

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

}  // namespace syncbn::data
