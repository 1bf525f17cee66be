#include <png.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <syncbn/base/error.h>

#include "orientation.h"
#include "reader.h"

namespace syncbn::data::detail {
namespace {

constexpr std::array<uint8_t, 8> kSignature = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
constexpr int kMaxValue = 255;

[[noreturn]] void on_error(png_structp png, png_const_charp message) {
  auto* jump = static_cast<ErrorJump*>(png_get_error_ptr(png));
  std::snprintf(jump->message, sizeof jump->message, "the PNG data is damaged (%s)", message);
  std::longjmp(jump->target, 1);
}

/// Ignores warnings, which do not concern pixels.
void on_warning(png_structp, png_const_charp) {}

void read_bytes(png_structp png, png_bytep out, size_t count) {
  auto& unread = *static_cast<std::span<const uint8_t>*>(png_get_io_ptr(png));
  if (unread.size() < count) png_error(png, "it ends too early; the file was cut short");
  std::memcpy(out, unread.data(), count);
  unread = unread.subspan(count);
}

/// Owns what libpng allocates.
struct Handles {
  png_structp png = nullptr;
  png_infop info = nullptr;

  Handles() = default;
  ~Handles() { destroy(); }
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;

  void destroy() { png_destroy_read_struct(&png, &info, nullptr); }
};

class PngReader : public ImageReader {
 public:
  PngReader(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options)
      : ImageReader(bytes, name), options_(options) {
    read_header();
    set_size(png_get_image_width(png_, info_), png_get_image_height(png_, info_), options);
  }

  int orientation() const override { return png_orientation(bytes_); }
  bool has_high_bits() const override { return depth_ == 16; }

  void read(const Box& box, Image& image) override {
    image = Image(box.width, box.height, 3);
    read_rows(box, [&](const uint8_t* stored, int64_t y) {
      to_rgb(stored + box.left * pixel_bytes(), box.width, image.row(y));
    });
  }

  void read_labels(const Box& box, Image& image) override {
    if (color_type_ != PNG_COLOR_TYPE_GRAY && color_type_ != PNG_COLOR_TYPE_PALETTE) {
      fail_to_decode(name_,
                     "it has colours or transparency; a mask is a grey or palette PNG: if "
                     "its channels are equal, save one of them");
    }
    image = Image(box.width, box.height, 1);
    const bool scales = options_.scale_labels && color_type_ == PNG_COLOR_TYPE_GRAY && depth_ < 8;
    int largest = 0;
    read_rows(box, [&](const uint8_t* stored, int64_t y) {
      for (int64_t x = 0; x < box.width; ++x) {
        const uint8_t* const at = stored + (box.left + x) * pixel_bytes();
        const int label = scales ? eight_bits(at) : value(at);
        largest = std::max(largest, label);
        image.row(y)[x] = static_cast<uint8_t>(label);
      }
    });
    if (largest > kMaxValue)
      fail_to_decode(
          name_, fmt::format("it has labels above 255, up to {}: save it with 8 bits", largest));
  }

 private:
  void read_header() {
    handles_.destroy();
    unread_ = bytes_;
    std::snprintf(jump_.message, sizeof jump_.message, "libpng cannot be set up");
    guarded([this] {
      png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, &jump_, on_error, on_warning);
      if (png_ == nullptr) std::longjmp(jump_.target, 1);
      info_ = png_create_info_struct(png_);
      if (info_ == nullptr) std::longjmp(jump_.target, 1);
      png_set_read_fn(png_, &unread_, read_bytes);
      // Skip all chunks that do not concern pixels: for some, libpng allocates as much memory as
      // their length says.
      png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
      png_read_info(png_, info_);
      depth_ = png_get_bit_depth(png_, info_);
      channels_ = png_get_channels(png_, info_);
      color_type_ = png_get_color_type(png_, info_);
      read_palette();
    });
  }

  void read_palette() {
    if (color_type_ != PNG_COLOR_TYPE_PALETTE) return;
    png_colorp colors = nullptr;
    int count = 0;
    png_get_PLTE(png_, info_, &colors, &count);
    // Colours beyond the palette's end stay black, as in Pillow.
    for (int i = 0; i < count; ++i) {
      palette_[static_cast<size_t>(i)] = {colors[i].red, colors[i].green, colors[i].blue};
    }
  }

  /// Calls take(row, y) for each row of the box. The row is the whole stored row, with one byte for
  /// each value of 1 to 8 bits.
  template <class Take>
  void read_rows(const Box& box, const Take& take) {
    if (was_read_) read_header();
    was_read_ = true;
    int passes = 1;
    guarded([&] {
      png_set_packing(png_);
      passes = png_set_interlace_handling(png_);
      png_read_update_info(png_, info_);
    });
    const size_t row_bytes = static_cast<size_t>(width() * pixel_bytes());
    // An interlaced image is complete only after its last pass.
    rows_.resize(passes == 1 ? row_bytes : row_bytes * static_cast<size_t>(height()));
    uint8_t* rows = rows_.data();
    const int64_t end = box.top + box.height;
    guarded([&] {
      for (int pass = 0; pass + 1 < passes; ++pass) {
        for (int64_t y = 0; y < height(); ++y) {
          png_read_row(png_, rows + static_cast<size_t>(y) * row_bytes, nullptr);
        }
      }
      for (int64_t y = 0; y < end; ++y) {
        uint8_t* row = passes == 1 ? rows : rows + static_cast<size_t>(y) * row_bytes;
        png_read_row(png_, row, nullptr);
        if (y >= box.top) take(row, y - box.top);
      }
    });
  }

  int64_t sample_bytes() const { return depth_ == 16 ? 2 : 1; }
  int64_t pixel_bytes() const { return channels_ * sample_bytes(); }

  int value(const uint8_t* at) const { return depth_ == 16 ? at[0] << 8 | at[1] : at[0]; }

  void to_rgb(const uint8_t* stored, int64_t count, uint8_t* rgb) const {
    for (int64_t i = 0; i < count; ++i, stored += pixel_bytes()) rgb = put_rgb(stored, rgb);
  }

  uint8_t* put_rgb(const uint8_t* pixel, uint8_t* rgb) const {
    switch (color_type_) {
      case PNG_COLOR_TYPE_PALETTE:
        return std::copy_n(palette_[pixel[0]].data(), 3, rgb);
      case PNG_COLOR_TYPE_GRAY:
      case PNG_COLOR_TYPE_GRAY_ALPHA:
        return std::fill_n(rgb, 3, eight_bits(pixel));
      default:
        for (int c = 0; c < 3; ++c) *rgb++ = eight_bits(pixel + c * sample_bytes());
        return rgb;
    }
  }

  uint8_t eight_bits(const uint8_t* stored) const {
    if (depth_ == 8) return *stored;
    if (depth_ == 16)
      return options_.clamp_high_bits ? static_cast<uint8_t>(std::min(value(stored), kMaxValue))
                                      : *stored;
    return static_cast<uint8_t>(*stored * (kMaxValue / ((1 << depth_) - 1)));
  }

  const DecodeOptions options_;
  std::span<const uint8_t> unread_;
  Handles handles_;
  png_structp& png_ = handles_.png;
  png_infop& info_ = handles_.info;
  int depth_ = 8;
  int channels_ = 3;
  int color_type_ = PNG_COLOR_TYPE_RGB;
  std::array<std::array<uint8_t, 3>, 256> palette_{};
  std::vector<uint8_t> rows_;
};

}  // namespace

bool is_png(std::span<const uint8_t> bytes) {
  return bytes.size() >= kSignature.size() &&
         std::equal(kSignature.begin(), kSignature.end(), bytes.begin());
}

std::unique_ptr<ImageReader> open_png(std::span<const uint8_t> bytes, const std::string& name,
                                      const DecodeOptions& options) {
  return std::make_unique<PngReader>(bytes, name, options);
}

}  // namespace syncbn::data::detail

namespace syncbn::data {

std::string encode_png(const Image& image, std::span<const uint8_t> palette) {
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  png.width = static_cast<png_uint_32>(image.width);
  png.height = static_cast<png_uint_32>(image.height);
  png.format = !palette.empty()      ? PNG_FORMAT_RGB_COLORMAP
               : image.channels == 3 ? PNG_FORMAT_RGB
                                     : PNG_FORMAT_GRAY;
  png.colormap_entries = static_cast<png_uint_32>(palette.size() / 3);
  std::string bytes(PNG_IMAGE_PNG_SIZE_MAX(png), '\0');
  png_alloc_size_t size = bytes.size();
  if (png_image_write_to_memory(&png, bytes.data(), &size, /*convert_to_8_bit=*/0,
                                image.pixels.data(), /*row_stride=*/0, palette.data()) == 0) {
    throw base::InternalError(fmt::format("cannot write a PNG: {}", png.message));
  }
  bytes.resize(size);
  return bytes;
}

}  // namespace syncbn::data
