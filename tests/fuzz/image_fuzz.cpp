// Feeds bytes to the image decoders. They must return an image or throw base::UserError.
#include <syncbn/base/error.h>
#include <syncbn/data/image.h>

#include <cstdint>
#include <span>

#include "require.h"

namespace {

using syncbn::base::UserError;
using syncbn::data::Box;
using syncbn::data::DecodeOptions;
using syncbn::data::Image;
using syncbn::data::ImageDecoder;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const uint8_t> bytes(data, size);
  const DecodeOptions options{.exif_orientation = true, .max_pixels = 100'000, .max_scans = 30};
  may_refuse<UserError>([&] {
    ImageDecoder decoder(bytes, "fuzz", options);
    const Box box{decoder.width() / 3, decoder.height() / 3, (decoder.width() + 2) / 3,
                  (decoder.height() + 2) / 3};
    may_refuse<UserError>([&] { require(decoder.decode_mask().channels == 1); });
    Image part;
    may_refuse<UserError>([&] { part = decoder.decode(box); });
    const Image whole = decoder.decode();
    require(whole.pixels.size() == static_cast<size_t>(3 * whole.width * whole.height));
    require(part.width == box.width && part.height == box.height);
  });
  return 0;
}
