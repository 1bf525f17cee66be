#pragma once

#include <cstdint>
#include <vector>

namespace syncbn::data::detail {

/// Bits of a weight after the binary point, as in Pillow: the sum of 8-bit pixels fits in 32 bits.
constexpr int kWeightBits = 22;

/// One axis of a resize: output i is the sum of weights[i * taps + k] * input[first[i] + k], k from
/// 0 to count[i].
struct ResizeAxis {
  int64_t taps = 0;
  std::vector<int32_t> first;
  std::vector<int32_t> count;
  std::vector<int32_t> weights;
  bool is_even = false;  ///< all counts are `taps`, which is even
};

/// Loops that are compiled once per instruction set: those of a resize, and what writes batches.
struct PixelLoops {
  /// A row of `out_width` pixels; `in` can be read kBeyondRow bytes beyond its end.
  void (*rgb_row)(const uint8_t* in, uint8_t* out, int64_t out_width, const ResizeAxis& axis);
  void (*grey_row)(const uint8_t* in, uint8_t* out, int64_t out_width, const ResizeAxis& axis);
  /// The sum of `count` rows of `bytes` bytes, which lie one behind the other.
  void (*column)(const uint8_t* in, uint8_t* out, int64_t bytes, const int32_t* weights,
                 int64_t count);
  /// `count` pixels of three channels, as three planes one behind the other.
  void (*rgb_planes)(const uint8_t* in, int64_t count, uint8_t* out);
};

/// Pixels are read as four bytes, pairs of them as eight.
constexpr int64_t kBeyondRow = 2;

namespace baseline {
PixelLoops pixel_loops();
}
namespace avx2 {
PixelLoops pixel_loops();
}

/// Those for this processor.
const PixelLoops& pixel_loops();

}  // namespace syncbn::data::detail
