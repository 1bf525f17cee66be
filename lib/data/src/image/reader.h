#pragma once

#include <csetjmp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <syncbn/data/image.h>

namespace syncbn::data::detail {

/// An image file whose header was read. Boxes are in the stored image, before orientation.
class ImageReader {
 public:
  virtual ~ImageReader() = default;

  virtual int64_t width() const = 0;
  virtual int64_t height() const = 0;
  /// EXIF's or else XMP's, 1 to 8; 1 if there is none.
  virtual int orientation() const = 0;
  /// Fills `image` with the RGB pixels in `box`.
  virtual void read(const Box& box, Image& image) = 0;
  /// Fills `image` with the labels in `box`.
  virtual void read_labels(const Box& box, Image& image) = 0;
};

bool is_jpeg(std::span<const uint8_t> bytes);
bool is_png(std::span<const uint8_t> bytes);
std::unique_ptr<ImageReader> open_jpeg(std::span<const uint8_t> bytes, const std::string& name,
                                       const DecodeOptions& options);
std::unique_ptr<ImageReader> open_png(std::span<const uint8_t> bytes, const std::string& name,
                                      const DecodeOptions& options);

/// @throws base::UserError "cannot decode '<name>': <why>".
[[noreturn]] void fail_to_decode(const std::string& name, const std::string& why);

/// @throws base::UserError for an image without pixels or with more than the options allow.
void check_size(const std::string& name, int64_t width, int64_t height,
                const DecodeOptions& options);

/// The target to which the error functions of libjpeg and libpng jump, since they must not return.
struct ErrorJump {
  std::jmp_buf target;
  char message[256] = "";
};

/// Runs calls of such a library; false if they ended in an error. `calls` must not create objects
/// with destructors, which the jump would skip.
template <class Calls>
bool runs_through(ErrorJump& errors, const Calls& calls) {
  if (setjmp(errors.target) != 0) return false;
  calls();
  return true;
}

}  // namespace syncbn::data::detail
