#pragma once

#include <zlib.h>

#include <cstdint>
#include <string>

namespace syncbn::test {

inline std::string big_endian(uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift & 0xff);
  return bytes;
}

inline std::string chunk(const std::string& type_and_data) {
  const auto* bytes = reinterpret_cast<const Bytef*>(type_and_data.data());
  return big_endian(static_cast<uint32_t>(type_and_data.size() - 4)) + type_and_data +
         big_endian(static_cast<uint32_t>(::crc32_z(0, bytes, type_and_data.size())));
}

/// @param pixels row by row, of 1 (grey) or 3 (RGB) bytes each
inline std::string png(uint32_t width, uint32_t height, const std::string& pixels) {
  const size_t row = pixels.size() / height;
  std::string rows;
  for (size_t y = 0; y < height; ++y) rows += '\0' + pixels.substr(y * row, row);
  uLongf size = ::compressBound(rows.size());
  std::string packed(size, '\0');
  ::compress(reinterpret_cast<Bytef*>(packed.data()), &size,
             reinterpret_cast<const Bytef*>(rows.data()), rows.size());
  packed.resize(size);
  const char color = row == width ? 0 : 2;
  return "\x89PNG\r\n\x1a\n" +
         chunk("IHDR" + big_endian(width) + big_endian(height) + std::string{8, color, 0, 0, 0}) +
         chunk("IDAT" + packed) + chunk("IEND");
}

}  // namespace syncbn::test
