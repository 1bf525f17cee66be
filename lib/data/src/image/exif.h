#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <syncbn/data/image.h>

namespace syncbn::data::detail {

/// The orientation (tag 0x0112 of the first directory) in EXIF data, which is a TIFF file's
/// beginning: 1, as stored, where its value makes no sense, and nothing where there is none.
std::optional<int> exif_orientation(std::span<const uint8_t> tiff);

/// The same of XMP data, which count where EXIF says nothing. Found as Pillow does: the first digit
/// behind `tiff:Orientation="` or `tiff:Orientation>`.
std::optional<int> xmp_orientation(std::string_view xmp);

/// Whether the orientation exchanges width and height.
constexpr bool swaps_sides(int orientation) {
  return orientation >= 5;
}

/// Where `box` of the turned image lies in the stored one, of `width` x `height`.
Box stored_box(const Box& box, int orientation, int64_t width, int64_t height);

/// The image turned from how it is stored to how it is seen.
Image turned(Image image, int orientation);

}  // namespace syncbn::data::detail
