// Feeds bytes to the reader of an image's orientation: as EXIF data, and as a chunk of a PNG file
// with a correct checksum, which image_fuzz does not guess.
#include <zlib.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "image/orientation.h"

namespace {

void require_orientation(int value) {
  if (value < 1 || value > 8) std::abort();
}

void put_number(std::string& bytes, uint32_t number) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
}

std::string png_with_exif(std::string_view data) {
  const std::string chunk = "eXIf" + std::string(data);
  const auto* bytes = reinterpret_cast<const Bytef*>(chunk.data());
  std::string file(8, '\0');
  put_number(file, static_cast<uint32_t>(data.size()));
  file += chunk;
  put_number(file, static_cast<uint32_t>(::crc32_z(0, bytes, chunk.size())));
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace syncbn::data::detail;
  require_orientation(exif_orientation({data, size}).value_or(1));
  const std::string file = png_with_exif({reinterpret_cast<const char*>(data), size});
  require_orientation(
      png_orientation({reinterpret_cast<const uint8_t*>(file.data()), file.size()}));
  return 0;
}
