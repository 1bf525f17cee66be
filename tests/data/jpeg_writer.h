#pragma once

#include <cstdint>
#include <string>

#include <syncbn/data/image.h>

namespace syncbn::test {

/// How to write a JPEG, with options that image libraries do not offer.
struct JpegStyle {
  enum class Colors { kYcc, kRgb, kGrey, kCmyk, kYcck };

  Colors colors = Colors::kYcc;
  int horizontal = 2;  ///< sampling factors of the first component
  int vertical = 2;
  bool progressive = false;
  bool arithmetic = false;
  bool one_scan_each = false;  ///< do not interleave the components
  int restart_interval = 0;    ///< in blocks
};

/// Returns the file's bytes. `image` has 3 channels, or 4 for CMYK and YCCK, or 1 for grey.
std::string write_jpeg(const data::Image& image, const JpegStyle& style = {});

/// A deterministic image with gradients, edges and noise.
data::Image picture(int64_t width, int64_t height, int64_t channels = 3);

}  // namespace syncbn::test
