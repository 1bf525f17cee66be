#include "checkpoints/sealed_archive.h"

#include <fmt/format.h>
#include <libdeflate.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <utility>

namespace syncbn::train {
namespace {

// An archive ends with its comment: this text, and the CRC-32 of all bytes before it in
// hexadecimal. libtorch does not verify the archive's own checksums, which do not cover its table
// of contents.
constexpr std::string_view kChecksum = "syncbn crc32 ";
constexpr size_t kDigits = 8;

using models::Sink;

uint32_t crc_of(std::string_view bytes, uint32_t before = 0) {
  return libdeflate_crc32(before, bytes.data(), bytes.size());
}

std::string checksum(uint32_t crc) {
  return fmt::format("{:08x}", crc);
}

/// Passes an archive without a comment on to a sink, and appends the checksum.
class Sealer {
 public:
  explicit Sealer(Sink sink) : sink_(std::move(sink)) {}

  void write(std::string_view bytes) {
    // Holds back the last two bytes: at the end of an archive they are the length of its comment.
    held_back_ += bytes.substr(bytes.size() - std::min(bytes.size(), kHeldBack));
    if (bytes.size() >= kHeldBack) {
      pass_on(std::string_view(held_back_).substr(0, held_back_.size() - kHeldBack));
      pass_on(bytes.substr(0, bytes.size() - kHeldBack));
    } else if (held_back_.size() > kHeldBack) {
      pass_on(std::string_view(held_back_).substr(0, held_back_.size() - kHeldBack));
    }
    held_back_.erase(0, held_back_.size() - std::min(held_back_.size(), kHeldBack));
  }

  void seal() {
    held_back_[0] = static_cast<char>(kChecksum.size() + kDigits);  // little-endian
    pass_on(held_back_);
    pass_on(kChecksum);
    sink_(checksum(crc_));
  }

 private:
  static constexpr size_t kHeldBack = 2;

  void pass_on(std::string_view bytes) {
    crc_ = crc_of(bytes, crc_);
    sink_(bytes);
  }

  Sink sink_;
  std::string held_back_;
  uint32_t crc_ = 0;
};

void write_to(const Dict& dict, const Sink& sink) {
  Sealer sealer(sink);
  models::write_torch_archive(dict, [&](std::string_view bytes) { sealer.write(bytes); });
  sealer.seal();
}

}  // namespace

std::string sealed_archive(const Dict& dict) {
  std::string bytes;
  write_to(dict, [&](std::string_view part) { bytes += part; });
  return bytes;
}

void write_sealed_archive(const Dict& dict, const std::filesystem::path& path) {
  models::write_parts(path, [&](const models::Sink& sink) { write_to(dict, sink); });
}

bool is_sealed(std::string_view bytes) {
  if (bytes.size() < kChecksum.size() + kDigits) return false;
  const std::string_view content = bytes.substr(0, bytes.size() - kDigits);
  return content.ends_with(kChecksum) && bytes.substr(content.size()) == checksum(crc_of(content));
}

std::string load_file(const std::filesystem::path& file) {
  spdlog::info("loads {}", file.string());
  return base::read_file(file);
}

std::string what_it_is(std::string_view bytes) {
  const std::string damaged = "it is damaged, truncated or another program's";
  // A damaged checkpoint is a zip file as well: do not advise to unpack it.
  return bytes.starts_with("PK") ? damaged : base::foreign_file(bytes, damaged);
}

/// A whole zip archive without our checksum, a pickle, as torch.save wrote before 1.6, or
/// safetensors.
bool is_of_python(std::string_view bytes) {
  constexpr std::string_view kEndOfZip = "PK\5\6";
  constexpr size_t kEndSize = 22;  // without a comment
  constexpr std::string_view kPickle = "\x80\x02";
  constexpr size_t kLengthSize = 8;  // of the header of safetensors
  if (bytes.starts_with(kPickle)) return true;
  if (bytes.size() > kLengthSize && bytes[kLengthSize] == '{') return true;
  return bytes.starts_with("PK") && bytes.size() >= kEndSize &&
         bytes.substr(bytes.size() - kEndSize).starts_with(kEndOfZip);
}

}  // namespace syncbn::train
