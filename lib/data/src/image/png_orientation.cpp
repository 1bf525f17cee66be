#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "exif.h"

namespace syncbn::data::detail {
namespace {

constexpr size_t kSignatureBytes = 8;
constexpr size_t kMaxTextBytes = 1 << 20;  // Pillow's limit

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

uint32_t u32(std::string_view bytes) {
  uint32_t value = 0;
  for (const char byte : bytes.substr(0, 4)) value = value << 8 | static_cast<uint8_t>(byte);
  return value;
}

/// Removes the text up to the first zero from `rest`; nothing if there is no zero.
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

/// Decodes EXIF data as ImageMagick wrote it before PNG had a chunk for it: lines with a name, a
/// length and hexadecimal digits.
std::string from_raw_profile(std::string_view text) {
  for (int line = 0; line < 3; ++line) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end + 1);
  }
  std::string digits;
  for (const char c : text) {
    if (c != '\n') digits += c;
  }
  std::string bytes;
  for (size_t at = 0; at + 2 <= digits.size(); at += 2) {
    uint8_t byte = 0;
    const char* pair = digits.data() + at;
    if (std::from_chars(pair, pair + 2, byte, 16).ptr != pair + 2) return {};
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

/// The chunks of a file that may have an orientation.
class Metadata {
 public:
  void read(std::string_view file) {
    bool has_pixels = false;
    constexpr size_t kFrameBytes = 12;  // length, kind and checksum
    for (file.remove_prefix(std::min(kSignatureBytes, file.size())); file.size() >= kFrameBytes;) {
      const size_t size = u32(file);
      if (size > file.size() - kFrameBytes) return;
      const std::string_view kind = file.substr(4, 4);
      // After the first frame of an animation, the rest belongs to other frames.
      if (kind == "IEND" || (kind == "fcTL" && has_pixels)) return;
      has_pixels = has_pixels || kind == "IDAT";
      if (is_relevant(kind) && u32(file.substr(8 + size)) == checksum(file.substr(4, 4 + size))) {
        keep(kind, file.substr(8, size));
      }
      file.remove_prefix(size + kFrameBytes);
    }
  }

  int orientation() const {
    if (const auto found = exif_orientation(bytes_of(tiff()))) return *found;
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

  /// Keeps the chunk. Only the last texts are inflated, in orientation(): there may be thousands.
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

int png_orientation(std::span<const uint8_t> file) {
  Metadata metadata;
  metadata.read({reinterpret_cast<const char*>(file.data()), file.size()});
  return metadata.orientation();
}

}  // namespace syncbn::data::detail
