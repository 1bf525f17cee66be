#pragma once

// Without torch's headers: this is compiled once per instruction set, and the linker could keep the
// AVX2 versions of their inline functions for all processors.

#include <cstdint>

namespace syncbn::dist::detail::shm {

/// out[i] = (in[0][i] op in[1][i] op ...) / divisor, in this order. `out` may be one of the inputs,
/// but must not overlap one in any other way.
using Reduce = void (*)(void* out, const void* const* in, int inputs, int64_t n, int divisor);

struct ReduceLoops {
  Reduce sum, product, min, max;
};

struct HalfConversion {
  void (*load)(const void* half, float* to, int64_t n);
  void (*store)(const float* from, void* half, int64_t n);
};

/// One table per instruction set.
struct ReduceTable {
  ReduceLoops of_float, of_double, of_int8, of_uint8, of_int32, of_int64;
  HalfConversion half;  ///< null if there are no instructions for it
};

namespace baseline {
const ReduceTable& reduce_table();
}  // namespace baseline
#ifdef SYNCBN_HAVE_AVX2
namespace avx2 {
const ReduceTable& reduce_table();
}  // namespace avx2
#endif

}  // namespace syncbn::dist::detail::shm
