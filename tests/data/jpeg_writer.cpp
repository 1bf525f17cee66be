#include "data/jpeg_writer.h"

#include <cstddef>
#include <cstdio>
#include <cstdlib>

// libjpeg-turbo's compressor.
#include <jpeglib.h>

#include <cmath>
#include <vector>

namespace syncbn::test {
namespace {

using Colors = JpegStyle::Colors;

J_COLOR_SPACE input_space(Colors colors) {
  if (colors == Colors::kGrey) return JCS_GRAYSCALE;
  return colors == Colors::kCmyk || colors == Colors::kYcck ? JCS_CMYK : JCS_RGB;
}

J_COLOR_SPACE stored_space(Colors colors) {
  switch (colors) {
    case Colors::kYcc:
      return JCS_YCbCr;
    case Colors::kRgb:
      return JCS_RGB;
    case Colors::kGrey:
      return JCS_GRAYSCALE;
    case Colors::kCmyk:
      return JCS_CMYK;
    default:
      return JCS_YCCK;
  }
}

}  // namespace

std::string write_jpeg(const data::Image& image, const JpegStyle& style) {
  jpeg_compress_struct cinfo{};
  jpeg_error_mgr errors{};
  cinfo.err = jpeg_std_error(&errors);  // exits on an error, which would be a mistake in the test
  jpeg_create_compress(&cinfo);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&cinfo, &bytes, &size);
  cinfo.image_width = static_cast<JDIMENSION>(image.width);
  cinfo.image_height = static_cast<JDIMENSION>(image.height);
  cinfo.input_components = static_cast<int>(image.channels);
  cinfo.in_color_space = input_space(style.colors);
  jpeg_set_defaults(&cinfo);
  jpeg_set_colorspace(&cinfo, stored_space(style.colors));
  jpeg_set_quality(&cinfo, 90, TRUE);
  for (int c = 0; c < cinfo.num_components; ++c) {
    // The first component, and the black of YCCK, have a higher resolution than the colours.
    const bool fine = c == 0 || c == 3;
    cinfo.comp_info[c].h_samp_factor = fine ? style.horizontal : 1;
    cinfo.comp_info[c].v_samp_factor = fine ? style.vertical : 1;
  }
  cinfo.arith_code = style.arithmetic ? TRUE : FALSE;
  cinfo.restart_interval = static_cast<unsigned>(style.restart_interval);
  std::vector<jpeg_scan_info> scans;
  if (style.progressive) {
    jpeg_simple_progression(&cinfo);
  } else if (style.one_scan_each) {
    for (int c = 0; c < cinfo.num_components; ++c) scans.push_back({1, {c}, 0, 63, 0, 0});
    cinfo.scan_info = scans.data();
    cinfo.num_scans = cinfo.num_components;
  }
  jpeg_start_compress(&cinfo, TRUE);
  for (int64_t y = 0; y < image.height; ++y) {
    auto* row = const_cast<uint8_t*>(image.row(y));
    jpeg_write_scanlines(&cinfo, &row, 1);
  }
  jpeg_finish_compress(&cinfo);
  jpeg_destroy_compress(&cinfo);
  std::string file(reinterpret_cast<const char*>(bytes), size);
  std::free(bytes);
  return file;
}

data::Image picture(int64_t width, int64_t height, int64_t channels) {
  data::Image image(width, height, channels);
  uint32_t noise = 1;
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int64_t c = 0; c < channels; ++c) {
        noise = noise * 1664525 + 1013904223;
        const auto at = static_cast<double>(x) / static_cast<double>(3 + c);
        const double slope = 128 + 80 * std::sin(at) + 30 * std::cos(static_cast<double>(y) / 5);
        const int64_t edge = (x / 9 + y / 7 + c) % 2 * 30;
        image.row(y)[x * channels + c] =
            static_cast<uint8_t>(static_cast<int64_t>(slope) - 15 + edge / 2 + (noise >> 28));
      }
    }
  }
  return image;
}

}  // namespace syncbn::test
