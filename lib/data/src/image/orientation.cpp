#include "orientation.h"

#include <zlib.h>

#include <algorithm>

namespace syncbn::data::detail {
namespace {

constexpr uint32_t kOrientationTag = 0x0112;
constexpr size_t kEntryBytes = 12;

/// Reads numbers in the file's byte order; 0 if out of bounds.
class TiffBytes {
 public:
  explicit TiffBytes(std::span<const uint8_t> bytes)
      : bytes_(bytes), little_(!bytes.empty() && bytes[0] == 'I') {}

  uint32_t u16(size_t at) const { return number(at, 2); }
  uint32_t u32(size_t at) const { return number(at, 4); }

 private:
  uint32_t number(size_t at, size_t size) const {
    if (at > bytes_.size() || bytes_.size() - at < size) return 0;
    uint32_t value = 0;
    for (size_t i = 0; i < size; ++i) {
      value = value << 8 | bytes_[at + (little_ ? size - 1 - i : i)];
    }
    return value;
  }

  std::span<const uint8_t> bytes_;
  bool little_;
};

/// An orientation: exchange x and y, then mirror sides of the stored image.
struct Turn {
  bool swap;
  bool mirror_x;
  bool mirror_y;
};

Turn turn_of(int orientation) {
  constexpr Turn kTurns[] = {{false, false, false}, {false, true, false}, {false, true, true},
                             {false, false, true},  {true, false, false}, {true, false, true},
                             {true, true, true},    {true, true, false}};
  return kTurns[orientation - 1];
}

constexpr size_t kSignatureBytes = 8;

uint32_t checksum(std::string_view bytes) {
  return static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

/// The last undamaged eXIf chunk of a PNG file, which may follow the pixels; empty if there is
/// none.
std::string_view exif_chunk(std::string_view file) {
  std::string_view found;
  bool has_pixels = false;
  constexpr size_t kFrameBytes = 12;  // length, kind and checksum
  for (file.remove_prefix(std::min(kSignatureBytes, file.size())); file.size() >= kFrameBytes;) {
    const size_t size = u32(file);
    if (size > file.size() - kFrameBytes) break;
    const std::string_view kind = file.substr(4, 4);
    // Chunks after the first frame of an animation belong to other frames.
    if (kind == "IEND" || (kind == "fcTL" && has_pixels)) break;
    has_pixels = has_pixels || kind == "IDAT";
    if (kind == "eXIf" && u32(file.substr(8 + size)) == checksum(file.substr(4, 4 + size))) {
      found = file.substr(8, size);
    }
    file.remove_prefix(size + kFrameBytes);
  }
  return found;
}

}  // namespace

uint32_t u32(std::string_view bytes) {
  uint32_t value = 0;
  for (const char byte : bytes.substr(0, 4)) value = value << 8 | static_cast<uint8_t>(byte);
  return value;
}

std::optional<int> exif_orientation(std::span<const uint8_t> tiff) {
  const TiffBytes bytes(tiff);
  if (bytes.u16(0) != 0x4949 && bytes.u16(0) != 0x4d4d) return std::nullopt;
  if (bytes.u16(2) != 42) return std::nullopt;
  const size_t directory = bytes.u32(4);
  const uint32_t entries = bytes.u16(directory);
  for (uint32_t i = 0; i < entries; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (bytes.u16(entry) != kOrientationTag) continue;
    const uint32_t given = bytes.u16(entry + 2) == 4 ? bytes.u32(entry + 8) : bytes.u16(entry + 8);
    return given >= 1 && given <= 8 ? static_cast<int>(given) : 1;
  }
  return std::nullopt;
}

int png_orientation(std::span<const uint8_t> file) {
  std::string_view exif = exif_chunk({reinterpret_cast<const char*>(file.data()), file.size()});
  while (exif.starts_with(kExifHeader)) exif.remove_prefix(kExifHeader.size());
  return exif_orientation({reinterpret_cast<const uint8_t*>(exif.data()), exif.size()}).value_or(1);
}

Box stored_box(const Box& box, int orientation, int64_t width, int64_t height) {
  const Turn turn = turn_of(orientation);
  Box stored = box;
  if (turn.swap) stored = {box.top, box.left, box.height, box.width};
  if (turn.mirror_x) stored.left = width - stored.left - stored.width;
  if (turn.mirror_y) stored.top = height - stored.top - stored.height;
  return stored;
}

Image oriented(Image image, int orientation) {
  if (orientation == 1) return image;
  const Turn turn = turn_of(orientation);
  Image out(turn.swap ? image.height : image.width, turn.swap ? image.width : image.height,
            image.channels);
  uint8_t* to = out.pixels.data();
  for (int64_t y = 0; y < out.height; ++y) {
    for (int64_t x = 0; x < out.width; ++x) {
      int64_t from_x = turn.swap ? y : x;
      int64_t from_y = turn.swap ? x : y;
      if (turn.mirror_x) from_x = image.width - 1 - from_x;
      if (turn.mirror_y) from_y = image.height - 1 - from_y;
      to = std::copy_n(image.row(from_y) + from_x * image.channels, image.channels, to);
    }
  }
  return out;
}

}  // namespace syncbn::data::detail
