// Feeds bytes to the reader of an image's orientation: as EXIF data, as XMP data, and as a chunk of
// a PNG file with a correct checksum, which image_fuzz does not guess. The first byte selects the
// kind.
#include <zlib.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <span>
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

std::string png_with(std::string_view kind, std::string_view data) {
  const std::string chunk = std::string(kind) + std::string(data);
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
  if (size == 0) return 0;
  constexpr std::array<std::string_view, 4> kKinds = {"eXIf", "iTXt", "tEXt", "zTXt"};
  const std::string_view content(reinterpret_cast<const char*>(data + 1), size - 1);
  require_orientation(exif_orientation({data + 1, size - 1}).value_or(1));
  require_orientation(xmp_orientation(content).value_or(1));
  const std::string file = png_with(kKinds[data[0] % kKinds.size()], content);
  require_orientation(
      png_orientation({reinterpret_cast<const uint8_t*>(file.data()), file.size()}));
  return 0;
}
