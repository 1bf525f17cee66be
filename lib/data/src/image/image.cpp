#include <syncbn/data/image.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "orientation.h"
#include "reader.h"

namespace syncbn::data {
namespace {

std::unique_ptr<detail::ImageReader> open(std::span<const uint8_t> bytes, const std::string& name,
                                          const DecodeOptions& options) {
  if (detail::is_jpeg(bytes)) return detail::open_jpeg(bytes, name, options);
  if (detail::is_png(bytes)) return detail::open_png(bytes, name, options);
  if (bytes.empty()) detail::fail_to_decode(name, "it is empty");
  const std::string other = fmt::format(
      "it is neither JPEG nor PNG (it begins with the bytes {:02x}); convert it, or take it out of "
      "the data set",
      fmt::join(bytes.first(std::min<size_t>(bytes.size(), 4)), " "));
  detail::fail_to_decode(
      name, base::foreign_file({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, other));
}

}  // namespace

namespace detail {

void fail_to_decode(const std::string& name, const std::string& why) {
  throw base::UserError(fmt::format("cannot decode '{}': {}", name, why));
}

void ImageReader::set_size(int64_t width, int64_t height, const DecodeOptions& options) {
  if (width < 1 || height < 1) {
    fail_to_decode(name_, fmt::format("it has {} x {} pixels", width, height));
  }
  if (width > options.max_pixels / height) {
    fail_to_decode(name_, fmt::format("its {} x {} pixels are more than max_pixels, {}; raise that "
                                      "if the file can be trusted",
                                      width, height, options.max_pixels));
  }
  width_ = width;
  height_ = height;
}

}  // namespace detail

Image::Image(int64_t width, int64_t height, int64_t channels)
    : width(width),
      height(height),
      channels(channels),
      pixels(static_cast<size_t>(width * height * channels)) {}

ImageDecoder::ImageDecoder(std::span<const uint8_t> bytes, std::string name,
                           const DecodeOptions& options)
    : name_(std::move(name)), reader_(open(bytes, name_, options)) {
  if (options.exif_orientation) orientation_ = reader_->orientation();
}

ImageDecoder::~ImageDecoder() = default;
ImageDecoder::ImageDecoder(ImageDecoder&&) noexcept = default;
ImageDecoder& ImageDecoder::operator=(ImageDecoder&&) noexcept = default;

int64_t ImageDecoder::width() const {
  return detail::swaps_sides(orientation_) ? reader_->height() : reader_->width();
}

int64_t ImageDecoder::height() const {
  return detail::swaps_sides(orientation_) ? reader_->width() : reader_->height();
}

int ImageDecoder::file_orientation() const {
  return reader_->orientation();
}

bool ImageDecoder::has_high_bits() const {
  return reader_->has_high_bits();
}

Image ImageDecoder::decode() {
  return decode({0, 0, width(), height()});
}

Image ImageDecoder::decode(const Box& box) {
  if (box.left < 0 || box.top < 0 || box.width < 1 || box.height < 1 ||
      box.left + box.width > width() || box.top + box.height > height()) {
    throw base::InternalError(
        fmt::format("{}: {} x {} pixels at ({}, {}) were requested from an image of {} x {}", name_,
                    box.width, box.height, box.left, box.top, width(), height()));
  }
  Image image;
  reader_->read(detail::stored_box(box, orientation_, reader_->width(), reader_->height()), image);
  return detail::oriented(std::move(image), orientation_);
}

Image ImageDecoder::decode_mask() {
  Image image;
  reader_->read_labels({0, 0, reader_->width(), reader_->height()}, image);
  return detail::oriented(std::move(image), orientation_);
}

Image load_image(const std::filesystem::path& path, const DecodeOptions& options) {
  const std::string bytes = base::read_file(path);
  return ImageDecoder({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, path.string(),
                      options)
      .decode();
}

}  // namespace syncbn::data
