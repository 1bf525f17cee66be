#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

// Results of at least this many bytes (in float32) bypass the cache: a core's L2 cache cannot hold
// such a result and its input, and would read each line from memory only to overwrite it.
inline constexpr int64_t kLargeBytes = int64_t{1} << 20;

/// The memory layout of a tensor [N, C, ...]: planes of one channel each, or rows of all channels.
/// On CPUs float16 and bfloat16 are computed in float32.
struct Shape {
  int64_t n, c, s = 1;
  bool rows;
  bool large;  ///< on CPUs results bypass the cache
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  at::ScalarType compute_type;  ///< on CPUs

  explicit Shape(const at::Tensor& input)
      : n(input.size(0)),
        c(input.size(1)),
        large(input.numel() * static_cast<int64_t>(sizeof(float)) >= kLargeBytes),
        compute_type(input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat) {
    for (int64_t dim = 2; dim < input.dim(); ++dim) s *= input.size(dim);
    rows = s == 1;
    const at::MemoryFormat suggested = input.suggest_memory_format();
    if (suggested == at::MemoryFormat::ChannelsLast ||
        suggested == at::MemoryFormat::ChannelsLast3d) {
      rows = true;
      format = suggested;
    }
  }
};

/// The number of planes or rows of a tensor, and of values in each.
struct Runs {
  int64_t count, values;
  explicit Runs(const Shape& shape)
      : count(shape.n * (shape.rows ? shape.s : shape.c)), values(shape.rows ? shape.c : shape.s) {}
};

}  // namespace syncbn::dist::detail
