#pragma once

#include <csetjmp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <syncbn/data/image.h>

namespace syncbn::data::detail {

/// @throws base::UserError "cannot decode '<name>': <why>".
[[noreturn]] void fail_to_decode(const std::string& name, const std::string& why);

/// The error functions of libjpeg and libpng, which must not return, jump to `target`.
struct ErrorJump {
  std::jmp_buf target;
  char message[256] = "";
};

/// An image file whose header was read. Boxes are in the stored image, before orientation.
class ImageReader {
 public:
  ImageReader(std::span<const uint8_t> bytes, const std::string& name)
      : bytes_(bytes), name_(name) {}
  virtual ~ImageReader() = default;
  ImageReader(const ImageReader&) = delete;
  ImageReader& operator=(const ImageReader&) = delete;

  int64_t width() const { return width_; }
  int64_t height() const { return height_; }
  /// The EXIF orientation, 1 to 8; 1 if there is none.
  virtual int orientation() const = 0;
  /// Whether values have 16 bits.
  virtual bool has_high_bits() const { return false; }
  /// Fills `image` with the RGB pixels in `box`.
  virtual void read(const Box& box, Image& image) = 0;
  /// Fills `image` with the labels in `box`.
  virtual void read_labels(const Box& box, Image& image) = 0;

 protected:
  /// Runs calls of libjpeg or libpng. `calls` must not create objects with destructors, which a
  /// jump would skip.
  /// @throws base::UserError with the library's message.
  template <class Calls>
  void guarded(const Calls& calls) {
    if (setjmp(jump_.target) != 0) fail_to_decode(name_, jump_.message);
    calls();
  }

  /// @throws base::UserError for an image without pixels or with more than max_pixels.
  void set_size(int64_t width, int64_t height, const DecodeOptions& options);

  const std::span<const uint8_t> bytes_;
  const std::string name_;
  ErrorJump jump_;
  bool was_read_ = false;

 private:
  int64_t width_ = 0;
  int64_t height_ = 0;
};

bool is_jpeg(std::span<const uint8_t> bytes);
bool is_png(std::span<const uint8_t> bytes);
std::unique_ptr<ImageReader> open_jpeg(std::span<const uint8_t> bytes, const std::string& name,
                                       const DecodeOptions& options);
std::unique_ptr<ImageReader> open_png(std::span<const uint8_t> bytes, const std::string& name,
                                      const DecodeOptions& options);

}  // namespace syncbn::data::detail
