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
};

/// The loops of a resize, compiled once per instruction set.
struct ResizeLoops {
  /// A row of `out_width` pixels; `in` can be read one byte beyond its end.
  void (*rgb_row)(const uint8_t* in, uint8_t* out, int64_t out_width, const ResizeAxis& axis);
  void (*grey_row)(const uint8_t* in, uint8_t* out, int64_t out_width, const ResizeAxis& axis);
  /// The sum of `count` rows of `bytes` bytes, which lie one behind the other.
  void (*column)(const uint8_t* in, uint8_t* out, int64_t bytes, const int32_t* weights,
                 int64_t count);
};

namespace baseline {
ResizeLoops resize_loops();
}
namespace avx2 {
ResizeLoops resize_loops();
}

}  // namespace syncbn::data::detail
