#pragma once

#include <syncbn/data/image.h>

#include <cstdint>
#include <iterator>
#include <string>

namespace syncbn::test {

/// An image as the bytes of a PNG file.
/// @param pixels row by row, 1 byte (grey) or 3 bytes (RGB) per pixel
inline std::string png(int64_t width, int64_t height, const std::string& pixels) {
  data::Image image(width, height, std::ssize(pixels) / (width * height));
  image.pixels.assign(pixels.begin(), pixels.end());
  return data::encode_png(image);
}

}  // namespace syncbn::test
