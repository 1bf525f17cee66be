#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace syncbn::data {

/// Eight-bit pixels in rows from the top, a pixel's channels side by side: [height, width,
/// channels].
struct Image {
  int64_t width = 0;
  int64_t height = 0;
  int64_t channels = 3;  ///< 3: red, green, blue; 1: the labels of a mask
  std::vector<uint8_t> pixels;

  Image() = default;
  /// All pixels are 0.
  Image(int64_t width, int64_t height, int64_t channels);

  int64_t row_bytes() const { return width * channels; }
  const uint8_t* row(int64_t y) const { return pixels.data() + y * row_bytes(); }
  uint8_t* row(int64_t y) { return pixels.data() + y * row_bytes(); }

  bool operator==(const Image&) const = default;
};

/// A rectangle of pixels.
struct Box {
  int64_t left = 0;
  int64_t top = 0;
  int64_t width = 0;
  int64_t height = 0;

  bool operator==(const Box&) const = default;
};

/// How image files are read. The limits are checked before memory is taken for pixels.
struct DecodeOptions {
  /// Turn the image as its EXIF data asks, or its XMP data where that says nothing
  /// (ImageOps.exif_transpose); false: as it was stored, which is what torchvision's data sets do.
  bool exif_orientation = false;
  int64_t max_pixels = 64'000'000;
  /// Of a progressive JPEG, whose every scan costs as much as a whole image.
  int max_scans = 1000;
};

namespace detail {
class ImageReader;
}

/// Reads a JPEG or PNG file, told apart by what is in it. Construction reads the header only.
///
///     ImageDecoder decoder(bytes, path);
///     Image image = decoder.decode();
///
/// RGB pixels are those of Pillow's Image.open(path).convert("RGB"), byte for byte: transparency is
/// dropped, of 16 bits the upper 8 are kept (but 16-bit grey is cut off at 255, as Pillow does),
/// CMYK is taken as Adobe stores it, inverted. Errors are base::UserError naming the file; as with
/// Pillow, a JPEG whose data is damaged but complete is decoded as well as that goes.
///
/// One thread at a time. Each call of decode() reads from the beginning.
class ImageDecoder {
 public:
  /// `bytes` must outlive the decoder; `name` is for messages.
  /// @throws base::UserError when it is neither JPEG nor PNG, its header is damaged, or it is
  ///   larger than the options allow.
  ImageDecoder(std::span<const uint8_t> bytes, std::string name, const DecodeOptions& options = {});
  ~ImageDecoder();
  ImageDecoder(ImageDecoder&&) noexcept;
  ImageDecoder& operator=(ImageDecoder&&) noexcept;

  /// Of the image that decode() gives: after it was turned.
  int64_t width() const;
  int64_t height() const;

  /// The whole image, RGB.
  Image decode();

  /// The part in `box`, RGB: the same bytes as decode() and a crop, but a JPEG is decoded there
  /// only. What is damaged or missing below the box goes unnoticed.
  /// @throws base::InternalError for a box that is empty or not within the image.
  Image decode(const Box& box);

  /// The labels of a mask, one channel: of a palette PNG the indices, of a grey one the values as
  /// stored (of one bit: 0 and 1).
  /// @throws base::UserError for a JPEG, colours that are no palette, and values above 255.
  Image decode_mask();

 private:
  std::string name_;
  std::unique_ptr<detail::ImageReader> reader_;
  int orientation_ = 1;
};

/// decode() of a file. @throws base::UserError naming it.
Image load_image(const std::filesystem::path& path, const DecodeOptions& options = {});

}  // namespace syncbn::data
