#pragma once

#include <syncbn/data/image.h>

#include <cstdint>
#include <iterator>
#include <string>

namespace syncbn::test {

/// The bytes of a PNG file.
/// @param pixels row by row, of 1 (grey) or 3 (RGB) bytes each
inline std::string png(int64_t width, int64_t height, const std::string& pixels) {
  data::Image image(width, height, std::ssize(pixels) / (width * height));
  image.pixels.assign(pixels.begin(), pixels.end());
  return data::encode_png(image);
}

}  // namespace syncbn::test
