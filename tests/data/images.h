#pragma once

#include <fmt/format.h>
#include <syncbn/data/image.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace syncbn::test {

/// The folder with the files of make_images.py.
inline const std::filesystem::path kImages = SYNCBN_SOURCE_DIR "/tests/data/images";

inline std::span<const uint8_t> bytes_of(const std::string& file) {
  return {reinterpret_cast<const uint8_t*>(file.data()), file.size()};
}

/// "width height FNV-1a", in the format of make_images.py.
inline std::string hash_of(const data::Image& image) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const uint8_t byte : image.pixels) hash = (hash ^ byte) * 0x100000001b3ULL;
  return fmt::format("{} {} {:016x}", image.width, image.height, hash);
}

}  // namespace syncbn::test
