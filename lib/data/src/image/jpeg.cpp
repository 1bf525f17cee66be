// jpeglib.h needs size_t and FILE.
#include <cstddef>
#include <cstdio>

#include <jpeglib.h>

#include <jerror.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include <syncbn/base/error.h>

#include "orientation.h"
#include "reader.h"

#ifndef LIBJPEG_TURBO_VERSION_NUMBER
#error "libjpeg-turbo is needed (libjpeg62-turbo-dev or libjpeg-turbo-devel), not IJG's libjpeg"
#endif

namespace syncbn::data::detail {
namespace {

/// Pixels to decode around a box on each side: upsampling reads neighbours, and libjpeg-turbo
/// treats the edges of a cropped region as edges of the image.
constexpr int64_t kMargin = 16;

constexpr int kApp1 = JPEG_APP0 + 1;  // the marker of EXIF

struct Progress : jpeg_progress_mgr {
  int max_scans;
};

[[noreturn]] void fail(j_common_ptr cinfo, const char* why) {
  auto& jump = *static_cast<ErrorJump*>(cinfo->client_data);
  std::snprintf(jump.message, sizeof jump.message, "%s", why);
  std::longjmp(jump.target, 1);
}

[[noreturn]] void on_error(j_common_ptr cinfo) {
  char text[JMSG_LENGTH_MAX];
  cinfo->err->format_message(cinfo, text);
  fail(cinfo, text);
}

/// Ignores warnings: decoding continues after damage, as in Pillow.
void on_message(j_common_ptr) {}

boolean on_end_of_data(j_decompress_ptr cinfo) {
  fail(reinterpret_cast<j_common_ptr>(cinfo),
       "the JPEG data ends too early; the file was cut short");
}

void check_scans(j_common_ptr cinfo) {
  const int max_scans = static_cast<Progress*>(cinfo->progress)->max_scans;
  if (reinterpret_cast<j_decompress_ptr>(cinfo)->input_scan_number <= max_scans) return;
  char text[96];
  std::snprintf(text, sizeof text, "it has more than max_scans, %d, progressive scans", max_scans);
  fail(cinfo, text);
}

/// value * share / 255, rounded, as Pillow computes it.
uint8_t times_share(int value, int share) {
  const int product = value * share + 128;
  return static_cast<uint8_t>(((product >> 8) + product) >> 8);
}

/// Converts CMYK as Adobe stores it, inverted: 255 means no ink. Like Pillow, inverts it and
/// subtracts each ink from the light that black leaves.
void cmyk_to_rgb(const uint8_t* cmyk, int64_t count, uint8_t* rgb) {
  for (int64_t i = 0; i < count; ++i, cmyk += 4) {
    const int light = cmyk[3];
    for (int c = 0; c < 3; ++c) {
      const int left = light - times_share(255 - cmyk[c], light);
      *rgb++ = static_cast<uint8_t>(std::clamp(left, 0, 255));
    }
  }
}

class JpegReader : public ImageReader {
 public:
  JpegReader(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options)
      : ImageReader(bytes, name) {
    cinfo_.client_data = &jump_;
    cinfo_.err = jpeg_std_error(&errors_);
    errors_.error_exit = on_error;
    errors_.output_message = on_message;
    progress_.progress_monitor = check_scans;
    progress_.max_scans = options.max_scans;
    guarded([this] {
      jpeg_create_decompress(&cinfo_);
      jpeg_save_markers(&cinfo_, kApp1, 0xffff);
    });
    read_header();
    // A copy: a second frame header may change the size in cinfo_ before libjpeg refuses it.
    set_size(cinfo_.image_width, cinfo_.image_height, options);
    const int components = cinfo_.num_components;
    if (components != 1 && components != 3 && components != 4) {
      fail_to_decode(name_,
                     fmt::format("it has {} colour components; 1, 3 and 4 are known", components));
    }
    orientation_ = find_orientation();
  }

  int orientation() const override { return orientation_; }

  void read(const Box& box, Image& image) override {
    if (was_read_) read_header();
    was_read_ = true;
    image = Image(box.width, box.height, 3);
    const bool is_cmyk = cinfo_.num_components == 4;
    cinfo_.out_color_space = is_cmyk ? JCS_CMYK : JCS_RGB;
    JDIMENSION left = 0;
    guarded([&] {
      jpeg_start_decompress(&cinfo_);
      left = crop(box);
    });
    row_.resize(size_t{cinfo_.output_width} * static_cast<size_t>(cinfo_.output_components));
    const int64_t skipped = (box.left - left) * cinfo_.output_components;
    guarded([&] {
      skip_to(box.top);
      uint8_t* row = row_.data();
      for (int64_t y = 0; y < box.height; ++y) {
        read_row(row);
        if (is_cmyk) {
          cmyk_to_rgb(row + skipped, box.width, image.row(y));
        } else {
          std::memcpy(image.row(y), row + skipped, static_cast<size_t>(image.row_bytes()));
        }
      }
    });
  }

  void read_labels(const Box&, Image&) override {
    fail_to_decode(name_, "it is a JPEG, which does not keep labels exactly; masks must be PNG");
  }

 private:
  void read_header() {
    guarded([this] {
      jpeg_abort_decompress(&cinfo_);
      jpeg_mem_src(&cinfo_, bytes_.data(), bytes_.size());
      cinfo_.src->fill_input_buffer = on_end_of_data;
      cinfo_.progress = &progress_;
      jpeg_read_header(&cinfo_, TRUE);
    });
  }

  /// From the first EXIF data, as in Pillow.
  int find_orientation() const {
    for (const auto* marker = cinfo_.marker_list; marker != nullptr; marker = marker->next) {
      const std::string_view data(reinterpret_cast<const char*>(marker->data), marker->data_length);
      if (marker->marker != kApp1 || !data.starts_with(kExifHeader)) continue;
      return exif_orientation(
                 {marker->data + kExifHeader.size(), marker->data_length - kExifHeader.size()})
          .value_or(1);
    }
    return 1;
  }

  /// Limits decoding to the columns around the box; returns the first of them.
  JDIMENSION crop(const Box& box) {
    auto left = static_cast<JDIMENSION>(std::max<int64_t>(box.left - kMargin, 0));
    const int64_t right = std::min<int64_t>(box.left + box.width + kMargin, width());
    auto columns = static_cast<JDIMENSION>(right - left);
    if (columns < cinfo_.output_width) jpeg_crop_scanline(&cinfo_, &left, &columns);
    return left;
  }

  void skip_to(int64_t top) {
    const int64_t skipped = top - kMargin;
    if (skipped > 0) jpeg_skip_scanlines(&cinfo_, static_cast<JDIMENSION>(skipped));
    while (cinfo_.output_scanline < top) read_row(row_.data());
  }

  void read_row(uint8_t* row) { jpeg_read_scanlines(&cinfo_, &row, 1); }

  jpeg_error_mgr errors_{};
  Progress progress_{};
  jpeg_decompress_struct cinfo_{};
  /// Has no effect on a struct that was never created.
  const std::unique_ptr<jpeg_decompress_struct, void (*)(j_decompress_ptr)> destroys_cinfo_{
      &cinfo_, &jpeg_destroy_decompress};
  std::vector<uint8_t> row_;
  int orientation_ = 1;
};

}  // namespace

bool is_jpeg(std::span<const uint8_t> bytes) {
  return bytes.size() >= 3 && bytes[0] == 0xff && bytes[1] == 0xd8 && bytes[2] == 0xff;
}

std::unique_ptr<ImageReader> open_jpeg(std::span<const uint8_t> bytes, const std::string& name,
                                       const DecodeOptions& options) {
  return std::make_unique<JpegReader>(bytes, name, options);
}

}  // namespace syncbn::data::detail

namespace syncbn::data {

std::string encode_jpeg(const Image& image, int quality) {
  detail::ErrorJump jump;
  jpeg_error_mgr errors{};
  jpeg_compress_struct cinfo{};
  cinfo.err = jpeg_std_error(&errors);
  errors.error_exit = detail::on_error;
  cinfo.client_data = &jump;
  unsigned char* bytes = nullptr;  // allocated by malloc()
  unsigned long size = 0;
  const auto encode = [&] {
    jpeg_create_compress(&cinfo);
    jpeg_mem_dest(&cinfo, &bytes, &size);
    cinfo.image_width = static_cast<JDIMENSION>(image.width);
    cinfo.image_height = static_cast<JDIMENSION>(image.height);
    cinfo.input_components = static_cast<int>(image.channels);
    cinfo.in_color_space = image.channels == 3 ? JCS_RGB : JCS_GRAYSCALE;
    jpeg_set_defaults(&cinfo);
    jpeg_set_quality(&cinfo, quality, /*force_baseline=*/TRUE);
    jpeg_start_compress(&cinfo, /*write_all_tables=*/TRUE);
    while (cinfo.next_scanline < cinfo.image_height) {
      // libjpeg only reads it, although the parameter is not const.
      auto* row = const_cast<JSAMPLE*>(image.row(cinfo.next_scanline));
      jpeg_write_scanlines(&cinfo, &row, 1);
    }
    jpeg_finish_compress(&cinfo);
  };
  const bool is_whole = setjmp(jump.target) == 0;
  if (is_whole) encode();
  jpeg_destroy_compress(&cinfo);
  const std::unique_ptr<unsigned char, decltype(&std::free)> owner(bytes, &std::free);
  if (!is_whole) throw base::InternalError(fmt::format("cannot write a JPEG: {}", jump.message));
  return {reinterpret_cast<const char*>(bytes), size};
}

}  // namespace syncbn::data
