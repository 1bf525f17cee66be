#include "weights/zip_archive.h"

#include <fmt/format.h>
#include <libdeflate.h>

#include <algorithm>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "weights/little_endian.h"

namespace syncbn::models::detail {
namespace {

// The format and its names are from PKWARE's APPNOTE 6.3.
constexpr std::string_view kLocalHeader = "PK\x03\x04";
constexpr std::string_view kCentralHeader = "PK\x01\x02";
constexpr std::string_view kEnd = "PK\x05\x06";
constexpr std::string_view kEnd64 = "PK\x06\x06";
constexpr std::string_view kLocator64 = "PK\x06\x07";
constexpr size_t kLocalSize = 30;
constexpr size_t kCentralSize = 46;
constexpr size_t kEndSize = 22;
constexpr size_t kEnd64Size = 56;
constexpr size_t kLocatorSize = 20;
constexpr size_t kMaxComment = 65535;
constexpr uint16_t kDeflated = 8;
constexpr uint32_t kIn64 = 0xffffffff;  // the value is in the zip64 field

[[noreturn]] void fail_table() {
  throw base::UserError("its table of contents is damaged; the file is probably truncated");
}

/// `size` bytes at `offset`. @throws base::UserError if there are fewer
std::string_view part(std::string_view bytes, uint64_t offset, uint64_t size) {
  if (offset > bytes.size() || size > bytes.size() - offset) fail_table();
  return bytes.substr(offset, size);
}

/// Reads values that do not fit into 32 bits from the zip64 field, in their fixed order.
class Zip64Field {
 public:
  explicit Zip64Field(std::string_view extra) {
    constexpr uint16_t kZip64 = 1;
    while (extra.size() >= 4) {
      const auto id = read_le<uint16_t>(extra, 0);
      const auto size = read_le<uint16_t>(extra, 2);
      const std::string_view content = part(extra, 4, size);
      if (id == kZip64) rest_ = content;
      extra.remove_prefix(4 + content.size());
    }
  }

  uint64_t value(uint32_t in_header) {
    if (in_header != kIn64) return in_header;
    const auto found = read_le<uint64_t>(part(rest_, 0, 8), 0);
    rest_.remove_prefix(8);
    return found;
  }

 private:
  std::string_view rest_;
};

}  // namespace

bool ZipArchive::begins(std::string_view bytes) {
  return bytes.starts_with(kLocalHeader);
}

ZipArchive::ZipArchive(std::string_view bytes) : bytes_(bytes) {
  const size_t tail = std::min(bytes.size(), kEndSize + kMaxComment);
  const size_t end = bytes.rfind(kEnd);
  if (end == bytes.npos || end < bytes.size() - tail) fail_table();
  const std::string_view record = part(bytes, end, kEndSize);
  uint64_t count = read_le<uint16_t>(record, 10);
  uint64_t size = read_le<uint32_t>(record, 12);
  uint64_t offset = read_le<uint32_t>(record, 16);
  if (end >= kLocatorSize && bytes.substr(end - kLocatorSize).starts_with(kLocator64)) {
    const auto at = read_le<uint64_t>(bytes.substr(end - kLocatorSize, kLocatorSize), 8);
    const std::string_view record64 = part(bytes, at, kEnd64Size);
    if (!record64.starts_with(kEnd64)) fail_table();
    count = read_le<uint64_t>(record64, 32);
    size = read_le<uint64_t>(record64, 40);
    offset = read_le<uint64_t>(record64, 48);
  }
  std::string_view headers = part(bytes, offset, size);
  for (uint64_t i = 0; i < count; ++i) {
    const std::string_view fixed = part(headers, 0, kCentralSize);
    if (!fixed.starts_with(kCentralHeader)) fail_table();
    const uint64_t length = kCentralSize + read_le<uint16_t>(fixed, 28) +
                            read_le<uint16_t>(fixed, 30) + read_le<uint16_t>(fixed, 32);
    add(part(headers, 0, length));
    headers.remove_prefix(length);
  }
}

void ZipArchive::add(std::string_view header) {
  const uint64_t name_size = read_le<uint16_t>(header, 28);
  const std::string name(part(header, kCentralSize, name_size));
  Zip64Field field(part(header, kCentralSize + name_size, read_le<uint16_t>(header, 30)));
  const uint64_t size = field.value(read_le<uint32_t>(header, 24));
  const uint64_t stored = field.value(read_le<uint32_t>(header, 20));
  const uint64_t offset = field.value(read_le<uint32_t>(header, 42));
  const std::string_view local = part(bytes_, offset, kLocalSize);
  if (!local.starts_with(kLocalHeader)) fail_table();
  const uint64_t begin =
      offset + kLocalSize + read_le<uint16_t>(local, 26) + read_le<uint16_t>(local, 28);
  const size_t slash = name.find('/');
  const std::string below = slash == name.npos ? name : name.substr(slash + 1);
  Entry entry{.stored = part(bytes_, begin, stored),
              .size = size,
              .crc = read_le<uint32_t>(header, 16),
              .method = read_le<uint16_t>(header, 10)};
  // Overlapping entries could take more memory than the file.
  if (stored > bytes_.size() - content_bytes_) fail_table();
  content_bytes_ += stored;
  if (!entries_.emplace(below, std::move(entry)).second) fail_table();
}

std::string_view ZipArchive::read(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    throw base::UserError(
        fmt::format("it is a zip archive without the entry '{}', which torch.save writes",
                    base::printable(name)));
  }
  const auto& [stored, size, expected, method, inflated] = found->second;
  std::string_view content = stored;
  if (method == kDeflated && size / 1032 <= stored.size()) {  // deflate's largest ratio
    const std::unique_ptr<libdeflate_decompressor, decltype(&libdeflate_free_decompressor)>
        inflater(libdeflate_alloc_decompressor(), &libdeflate_free_decompressor);
    // Not initialized: a damaged entry takes only as much memory as it fills.
    inflated = std::make_unique_for_overwrite<char[]>(size);
    size_t bytes = 0;
    libdeflate_deflate_decompress(inflater.get(), stored.data(), stored.size(), inflated.get(),
                                  size, &bytes);
    content = {inflated.get(), bytes};
  }
  if (content.size() != size) {
    throw base::UserError(
        fmt::format("its entry '{}' is damaged, or compressed by another method than deflate",
                    base::printable(name)));
  }
  const uint32_t crc = libdeflate_crc32(0, content.data(), content.size());
  // torch.serialization.set_crc32_options(False) leaves checksums out.
  if (expected != 0 && crc != expected) {
    throw base::UserError(
        fmt::format("its entry '{}' is damaged: the checksum is wrong", base::printable(name)));
  }
  return content;
}

}  // namespace syncbn::models::detail
