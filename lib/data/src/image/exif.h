#pragma once

#include <cstdint>
#include <span>

#include <syncbn/data/image.h>

namespace syncbn::data::detail {

/// The orientation (tag 0x0112 of the first directory) in EXIF data, which is a TIFF file's
/// beginning; 1, as stored, where it says nothing or nothing sensible.
int exif_orientation(std::span<const uint8_t> tiff);

/// Whether the orientation exchanges width and height.
constexpr bool swaps_sides(int orientation) {
  return orientation >= 5;
}

/// Where `box` of the turned image lies in the stored one, of `width` x `height`.
Box stored_box(const Box& box, int orientation, int64_t width, int64_t height);

/// The image turned from how it is stored to how it is seen.
Image turned(Image image, int orientation);

}  // namespace syncbn::data::detail
