#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <syncbn/data/image.h>

namespace syncbn::data::detail {

/// Precedes EXIF data in a JPEG file, and in the eXIf chunks that some programs write.
constexpr std::string_view kExifHeader("Exif\0\0", 6);

/// The orientation (tag 0x0112 of the first directory) in EXIF data, which begins as a TIFF file
/// does. 1 if its value is invalid, nothing if there is none.
std::optional<int> exif_orientation(std::span<const uint8_t> tiff);

/// The orientation of a PNG file, 1 to 8, from the last undamaged eXIf chunk before or after the
/// pixels; 1 if there is none.
int png_orientation(std::span<const uint8_t> file);

/// The number in the first 4 bytes, big-endian.
uint32_t u32(std::string_view bytes);

/// Whether the orientation exchanges width and height.
constexpr bool swaps_sides(int orientation) {
  return orientation >= 5;
}

/// The part of the stored image, of `width` x `height`, that becomes `box` of the oriented one.
Box stored_box(const Box& box, int orientation, int64_t width, int64_t height);

/// Turns a stored image to its orientation.
Image oriented(Image image, int orientation);

}  // namespace syncbn::data::detail
