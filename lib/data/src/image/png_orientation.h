#pragma once

#include <cstdint>
#include <span>

namespace syncbn::data::detail {

/// The orientation that a PNG file asks for, 1 to 8: of its EXIF data, else of its XMP data, before
/// or behind the pixels, which are not looked at; 1 where there is none. Of data that come twice
/// the last count. What is damaged counts as missing. As Pillow's ImageOps.exif_transpose, but
/// for damaged data, of which Pillow takes some.
int png_orientation(std::span<const uint8_t> file);

}  // namespace syncbn::data::detail
