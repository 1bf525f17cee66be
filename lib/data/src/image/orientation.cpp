#include "orientation.h"

#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <string>

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

int valid_or_1(uint32_t orientation) {
  return orientation >= 1 && orientation <= 8 ? static_cast<int>(orientation) : 1;
}

constexpr size_t kSignatureBytes = 8;
constexpr size_t kMaxTextBytes = 1 << 20;  // Pillow's limit

uint32_t u32(std::string_view bytes) {
  uint32_t value = 0;
  for (const char byte : bytes.substr(0, 4)) value = value << 8 | static_cast<uint8_t>(byte);
  return value;
}

/// Removes the text up to the first zero byte from `rest` and returns it; nothing if there is none.
std::optional<std::string_view> take_word(std::string_view& rest) {
  const size_t zero = rest.find('\0');
  if (zero == std::string_view::npos) return std::nullopt;
  const std::string_view word = rest.substr(0, zero);
  rest.remove_prefix(zero + 1);
  return word;
}

/// Nothing if the data is damaged or the text too long.
std::optional<std::string> inflated(std::string_view compressed) {
  std::string text(kMaxTextBytes, '\0');
  uLongf size = text.size();
  const auto* from = reinterpret_cast<const Bytef*>(compressed.data());
  if (::uncompress(reinterpret_cast<Bytef*>(text.data()), &size, from, compressed.size()) != Z_OK) {
    return std::nullopt;
  }
  text.resize(size);
  return text;
}

struct TextChunk {
  std::string_view kind;
  std::string_view rest;  ///< after the key
};

/// Nothing if the chunk is damaged.
std::optional<std::string> text_of(TextChunk chunk) {
  auto& [kind, rest] = chunk;
  if (kind == "tEXt") return std::string(rest);
  if (rest.empty()) return std::nullopt;
  if (kind == "zTXt") return inflated(rest.substr(1));
  if (rest.size() < 2) return std::nullopt;
  const bool is_compressed = rest[0] != 0;
  rest.remove_prefix(2);
  if (!take_word(rest) || !take_word(rest)) return std::nullopt;  // language and translated key
  return is_compressed ? inflated(rest) : std::string(rest);
}

/// Decodes EXIF data as ImageMagick wrote it before PNG had a chunk for it: a line with a name, one
/// with a length, then hexadecimal digits.
std::string from_raw_profile(std::string_view text) {
  for (int line = 0; line < 3; ++line) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end + 1);
  }
  std::string digits(text);
  std::erase(digits, '\n');
  std::string bytes;
  for (size_t at = 0; at + 2 <= digits.size(); at += 2) {
    uint8_t byte = 0;
    const char* pair = digits.data() + at;
    if (std::from_chars(pair, pair + 2, byte, 16).ptr != pair + 2) return {};
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

/// The chunks of a PNG file that may hold an orientation.
class Metadata {
 public:
  void read(std::string_view file) {
    bool has_pixels = false;
    constexpr size_t kFrameBytes = 12;  // length, kind and checksum
    for (file.remove_prefix(std::min(kSignatureBytes, file.size())); file.size() >= kFrameBytes;) {
      const size_t size = u32(file);
      if (size > file.size() - kFrameBytes) return;
      const std::string_view kind = file.substr(4, 4);
      // Chunks after the first frame of an animation belong to other frames.
      if (kind == "IEND" || (kind == "fcTL" && has_pixels)) return;
      has_pixels = has_pixels || kind == "IDAT";
      if (is_relevant(kind) && u32(file.substr(8 + size)) == checksum(file.substr(4, 4 + size))) {
        keep(kind, file.substr(8, size));
      }
      file.remove_prefix(size + kFrameBytes);
    }
  }

  int orientation() const {
    const std::string exif = tiff();
    const auto* bytes = reinterpret_cast<const uint8_t*>(exif.data());
    if (const auto found = exif_orientation({bytes, exif.size()})) return *found;
    const auto xmp = text_of(xmp_);
    return xmp ? xmp_orientation(*xmp).value_or(1) : 1;
  }

 private:
  static bool is_relevant(std::string_view kind) {
    return kind == "eXIf" || kind == "iTXt" || kind == "tEXt" || kind == "zTXt";
  }

  static uint32_t checksum(std::string_view bytes) {
    return static_cast<uint32_t>(
        ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
  }

  /// Keeps the last chunk of each kind. orientation() inflates only those: there may be thousands.
  void keep(std::string_view kind, std::string_view data) {
    if (kind == "eXIf") {
      exif_ = data;
      return;
    }
    const auto key = take_word(data);
    if (key == "XML:com.adobe.xmp") xmp_ = {kind, data};
    if (key == "Raw profile type exif") raw_profile_ = {kind, data};
  }

  std::string tiff() const {
    std::string bytes = exif_ ? std::string(*exif_)
                              : from_raw_profile(text_of(raw_profile_).value_or(std::string()));
    constexpr std::string_view kPrefix("Exif\0\0", 6);
    size_t begin = 0;
    while (bytes.compare(begin, kPrefix.size(), kPrefix) == 0) {
      begin += kPrefix.size();
    }
    return bytes.substr(begin);
  }

  std::optional<std::string_view> exif_;
  TextChunk raw_profile_;
  TextChunk xmp_;
};

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

int png_orientation(std::span<const uint8_t> file) {
  Metadata metadata;
  metadata.read({reinterpret_cast<const char*>(file.data()), file.size()});
  return metadata.orientation();
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
