#include "exif.h"

#include <algorithm>
#include <utility>

namespace syncbn::data::detail {
namespace {

constexpr uint32_t kOrientationTag = 0x0112;
constexpr size_t kEntryBytes = 12;

/// Reads numbers in the file's byte order. Those out of bounds are 0.
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

/// An orientation: exchange x and y, then mirror the sides of the stored image.
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

int valid_or_1(uint32_t orientation) {
  return orientation >= 1 && orientation <= 8 ? static_cast<int>(orientation) : 1;
}

}  // namespace

std::optional<int> exif_orientation(std::span<const uint8_t> tiff) {
  const TiffBytes bytes(tiff);
  if (bytes.u16(0) != 0x4949 && bytes.u16(0) != 0x4d4d) return std::nullopt;
  if (bytes.u16(2) != 42) return std::nullopt;
  const size_t directory = bytes.u32(4);
  const uint32_t entries = bytes.u16(directory);
  for (uint32_t i = 0; i < entries; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (bytes.u16(entry) != kOrientationTag) continue;
    return valid_or_1(bytes.u16(entry + 2) == 4 ? bytes.u32(entry + 8) : bytes.u16(entry + 8));
  }
  return std::nullopt;
}

std::optional<int> xmp_orientation(std::string_view xmp) {
  constexpr std::string_view kName = "tiff:Orientation";
  for (size_t at = xmp.find(kName); at != std::string_view::npos; at = xmp.find(kName, at + 1)) {
    std::string_view rest = xmp.substr(at + kName.size());
    if (rest.starts_with("=\"")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with('>')) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    if (!rest.empty() && rest[0] >= '0' && rest[0] <= '9') {
      return valid_or_1(static_cast<uint32_t>(rest[0] - '0'));
    }
  }
  return std::nullopt;
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
