#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "batch_norm/batch_norm_cpu_loops.h"

// Divides the values of a tensor among ATen's threads, and selects the loops for this processor.

namespace syncbn::dist::detail::cpu {

// Results of at least this many bytes (in float32) bypass the cache: a core's L2 cache cannot hold
// such a result and its input, and would read each line from memory only to overwrite it.
inline constexpr int64_t kLargeBytes = int64_t{1} << 20;

/// The memory layout of a tensor [N, C, ...]: planes of one channel each, or rows of all channels.
/// float16 and bfloat16 are computed in float32.
struct Shape {
  int64_t n, c, s = 1;
  bool rows;
  bool large;  ///< results bypass the cache
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  at::ScalarType compute_type;

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

// Minimum number of values, and of rows, per task. Tasks, and so results, do not depend on the
// number of threads.
inline constexpr int64_t kValuesPerTask = int64_t{1} << 18;
inline constexpr int64_t kRowsPerTask = 64;
// Upper bound in bytes on a channel to prefetch while the previous one is processed: the channels
// of several tensors must fit in the L2 cache.
inline constexpr int64_t kMaxPrefetchBytes = int64_t{64} << 10;
// Minimum number of values per thread: for fewer, another thread does not pay off.
inline constexpr int64_t kGrain = 32768;

template <class T>
const Loops<T>& loops() {
#ifdef SYNCBN_HAVE_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) return avx2::loops<T>();
#endif
  return baseline::loops<T>();
}

inline at::Tensor dense(const at::Tensor& tensor, const Shape& shape) {
  return tensor.to(shape.compute_type).contiguous(shape.format);
}

template <class Run>
void with_type(at::ScalarType type, Run run) {
  if (type == at::kDouble) {
    run(double{});
  } else {
    run(float{});
  }
}

/// Calls run(begin, end) on ATen's threads for parts of at least `grain` that cover [0, end).
void parallel_for(int64_t end, int64_t grain, c10::function_ref<void(int64_t, int64_t)> run);

/// Calls run(part) on ATen's threads for parts that cover the tensor.
template <class Run>
void for_planes(const Shape& shape, Run run) {
  const int64_t per_channel = std::max<int64_t>(1, shape.n * shape.s);
  parallel_for(shape.c, std::max<int64_t>(1, kGrain / per_channel),
               [&](int64_t begin, int64_t end) {
                 run(Planes{shape.n, shape.c, shape.s, begin, end, shape.large});
               });
}

/// Calls run(part, channel) with parts of one channel: for work that reads each channel twice.
template <class Run>
void for_channels(const Shape& shape, Run run) {
  const bool prefetch =
      shape.n * shape.s * static_cast<int64_t>(sizeof(float)) <= kMaxPrefetchBytes;
  for_planes(shape, [&](const Planes& part) {
    for (int64_t c = part.begin; c < part.end; ++c) {
      run(Planes{part.n, part.c, part.s, c, c + 1, part.stream, prefetch && c + 1 < part.end}, c);
    }
  });
}

inline int64_t rows_per_task(const Shape& shape) {
  return std::max(kRowsPerTask, kValuesPerTask / std::max<int64_t>(1, shape.c));
}

inline int64_t row_tasks(const Shape& shape) {
  const int64_t per_task = rows_per_task(shape);
  return (shape.n * shape.s + per_task - 1) / per_task;
}

inline Rows rows_of_task(const Shape& shape, int64_t task) {
  const int64_t first = task * rows_per_task(shape);
  const int64_t last = std::min(first + rows_per_task(shape), shape.n * shape.s);
  return {shape.c, first, last, shape.large};
}

/// Calls run(part, task) on ATen's threads for row_tasks() parts that cover the tensor.
template <class Run>
void for_rows(const Shape& shape, Run run) {
  parallel_for(row_tasks(shape), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) run(rows_of_task(shape, task), task);
  });
}

/// Calls run(part) in the reverse order of for_rows(), for the second pass over a tensor: the rows
/// that the first pass read last are still in the cache.
template <class Run>
void for_rows_reversed(const Shape& shape, Run run) {
  parallel_for(row_tasks(shape), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = end; task-- > begin;) run(rows_of_task(shape, task));
  });
}

}  // namespace syncbn::dist::detail::cpu
