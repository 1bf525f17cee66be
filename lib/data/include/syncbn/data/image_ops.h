#pragma once

#include <array>
#include <cstdint>

#include <syncbn/data/image.h>

namespace syncbn::data {

// Image operations whose results equal those of Pillow, as called by
// torchvision.transforms.functional, byte for byte. Images have 3 channels, or 1 (grey, or a mask);
// sizes and boxes are in pixels. Thread-safe.

/// Image.resize((width, height), BILINEAR), anti-aliased, with the arithmetic of Pillow up to 12.2.
/// @throws base::InternalError for a size below 1 x 1.
Image resize(const Image& image, int64_t width, int64_t height);

/// Image.resize((width, height), NEAREST), for masks.
Image resize_nearest(const Image& image, int64_t width, int64_t height);

/// The part in `box`, which must be within the image.
Image crop(const Image& image, const Box& box);

/// Adds a border of `value` with these widths.
Image pad(const Image& image, int64_t left, int64_t top, int64_t right, int64_t bottom,
          uint8_t value);

void flip_horizontally(Image& image);
void flip_vertically(Image& image);

/// Maps the centre (x, y) of a result pixel to the source: x' = m[0] x + m[1] y + m[2] and
/// y' = m[3] x + m[4] y + m[5].
using AffineMatrix = std::array<double, 6>;

/// Image.transform(size, AFFINE, matrix, NEAREST). Pixels outside of the source are `fill`.
Image affine(const Image& image, const AffineMatrix& matrix, uint8_t fill);

/// Image.rotate(degrees, NEAREST), counter-clockwise about the centre.
Image rotate(const Image& image, double degrees, uint8_t fill);

/// Blend the image with black, with its mean grey, or with its grey version. Factor 1 changes
/// nothing.
void adjust_brightness(Image& image, double factor);
void adjust_contrast(Image& image, double factor);
void adjust_saturation(Image& image, double factor);

/// Rotates hues by `factor` of the colour circle, -0.5 to 0.5.
void adjust_hue(Image& image, double factor);

/// Blends the image with its smoothed version. Factor 1 changes nothing.
void adjust_sharpness(Image& image, double factor);

/// Keeps the upper `bits` (0 to 8) bits of each value.
void posterize(Image& image, int bits);

/// Inverts values of `threshold` and above.
void solarize(Image& image, double threshold);

/// Stretches each channel to 0..255.
void autocontrast(Image& image);

/// Equalizes each channel's histogram.
void equalize(Image& image);

}  // namespace syncbn::data
