#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace syncbn::data {

/// Eight-bit pixels, row-major: [height, width, channels].
struct Image {
  int64_t width = 0;
  int64_t height = 0;
  int64_t channels = 3;  ///< 3: red, green, blue; 1: the labels of a mask
  std::vector<uint8_t> pixels;

  Image() = default;
  /// A black image.
  Image(int64_t width, int64_t height, int64_t channels);

  int64_t row_bytes() const { return width * channels; }
  const uint8_t* row(int64_t y) const { return pixels.data() + y * row_bytes(); }
  uint8_t* row(int64_t y) { return pixels.data() + y * row_bytes(); }

  bool operator==(const Image&) const = default;
};

struct ImageSize {
  int64_t width = 0;
  int64_t height = 0;

  bool operator==(const ImageSize&) const = default;
};

struct Box {
  int64_t left = 0;
  int64_t top = 0;
  int64_t width = 0;
  int64_t height = 0;

  bool operator==(const Box&) const = default;
};

/// How image files are read. Limits are checked before memory for pixels is allocated.
struct DecodeOptions {
  /// Apply the EXIF orientation, as Pillow's ImageOps.exif_transpose does, but not that of XMP data
  /// or of a PNG's text chunks. torchvision's data sets do not.
  bool exif_orientation = false;
  int64_t max_pixels = 64'000'000;
  /// Upper bound on the scans of a progressive JPEG, each of which costs as much as decoding a
  /// whole image.
  int max_scans = 1000;
  /// Values of 16 bits above 255 become 255, as grey ones do in Pillow; otherwise the upper 8 bits
  /// count.
  bool clamp_high_bits = false;
  /// The labels of grey masks of 1, 2 and 4 bits are scaled to 8 bits, as an editor shows them.
  bool scale_labels = false;
};

namespace detail {
class ImageReader;
}

/// Reads a JPEG or PNG file, detected by content. The constructor reads only the header.
///
///     ImageDecoder decoder(bytes, path);
///     Image image = decoder.decode();
///
/// RGB pixels equal those of Pillow's Image.open(path).convert("RGB"), byte for byte: transparency
/// is dropped, 16-bit values keep their upper 8 bits (Pillow's 16-bit grey needs clamp_high_bits),
/// and CMYK is read inverted, as Adobe stores it. Like Pillow, it decodes a damaged JPEG as far as
/// possible unless it is truncated. Other errors are base::UserError naming the file.
///
/// Not thread-safe. Each call of decode() reads from the beginning.
class ImageDecoder {
 public:
  /// `bytes` must outlive the decoder; `name` is for messages.
  /// @throws base::UserError if it is neither JPEG nor PNG, its header is damaged, or it is larger
  ///   than the options allow.
  ImageDecoder(std::span<const uint8_t> bytes, std::string name, const DecodeOptions& options = {});
  ~ImageDecoder();
  ImageDecoder(ImageDecoder&&) noexcept;
  ImageDecoder& operator=(ImageDecoder&&) noexcept;

  /// The size of decode()'s result, after orientation.
  int64_t width() const;
  int64_t height() const;

  /// The EXIF orientation in the file, 1 to 8, whether or not decode() applies it; 1 if there is
  /// none. From 5, width and height of the upright image are those of the stored one, exchanged.
  int file_orientation() const;
  /// Whether the file has values of 16 bits, which DecodeOptions::clamp_high_bits is about.
  bool has_high_bits() const;

  /// The whole image, RGB.
  Image decode();

  /// The part in `box`, RGB: the same bytes as decode() and crop(), but only that part of a JPEG is
  /// decoded. Damage below the box is not detected.
  /// @throws base::InternalError for a box that is empty or not within the image.
  Image decode(const Box& box);

  /// The labels of a mask, one channel: the indices of a palette PNG, or the stored values of a
  /// grey PNG (0 and 1 for one bit, unless DecodeOptions::scale_labels).
  /// @throws base::UserError for a JPEG, other colour types, and values above 255.
  Image decode_mask();

 private:
  std::string name_;
  std::unique_ptr<detail::ImageReader> reader_;
  int orientation_ = 1;
};

/// @throws base::UserError naming the file.
Image load_image(const std::filesystem::path& path, const DecodeOptions& options = {});

/// The bytes of a PNG file: RGB, grey for one channel, or one channel with a palette.
/// @param palette red, green and blue of each value; empty: no palette
std::string encode_png(const Image& image, std::span<const uint8_t> palette = {});

/// The bytes of a JPEG file: RGB, or grey for one channel.
/// @param quality from 1 to 100
std::string encode_jpeg(const Image& image, int quality);

}  // namespace syncbn::data
