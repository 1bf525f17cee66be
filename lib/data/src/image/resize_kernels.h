#pragma once

#include <cstdint>
#include <vector>

namespace syncbn::data::detail {

/// Fractional bits of a weight, as in Pillow: a weighted sum of 8-bit pixels fits into 32 bits.
constexpr int kWeightBits = 22;

/// One axis of a resize: output i is the sum of weights[i * taps + k] * input[first[i] + k] over
/// k < count[i].
struct ResizeAxis {
  int64_t taps = 0;
  std::vector<int32_t> first;
  std::vector<int32_t> count;
  std::vector<int32_t> weights;
  bool is_even = false;  ///< all counts are `taps`, which is even
};

/// Loops that are compiled once per instruction set, for resize() and for writing batches.
struct PixelLoops {
  /// A row of `out_width` pixels. kBeyondRow bytes after the end of `in` must be readable.
  void (*rgb_row)(const uint8_t* in, uint8_t* out, int64_t out_width, const ResizeAxis& axis);
  void (*grey_row)(const uint8_t* in, uint8_t* out, int64_t out_width, const ResizeAxis& axis);
  /// The weighted sum of `count` successive rows of `bytes` bytes.
  void (*column)(const uint8_t* in, uint8_t* out, int64_t bytes, const int32_t* weights,
                 int64_t count);
  /// Splits `count` RGB pixels into three planes that begin `distance` bytes after one another.
  void (*rgb_planes)(const uint8_t* in, int64_t count, uint8_t* out, int64_t distance);
};

/// rgb_row() reads a pixel (3 bytes) as 4 bytes, and a pair of pixels as 8.
constexpr int64_t kBeyondRow = 2;

namespace baseline {
PixelLoops pixel_loops();
}
namespace avx2 {
PixelLoops pixel_loops();
}

/// The loops for this processor.
const PixelLoops& pixel_loops();

}  // namespace syncbn::data::detail
