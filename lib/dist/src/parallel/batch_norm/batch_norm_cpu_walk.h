#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "batch_norm/batch_norm_cpu_loops.h"

// How the CPU's kernels go over a tensor: the loops for this processor, the way its values lie, and
// ATen's threads.

namespace syncbn::dist::detail::cpu {

// Values, and at least so many rows, that make one task: fixed, so that results do not depend on
// the number of threads.
inline constexpr int64_t kValuesPerTask = int64_t{1} << 18;
inline constexpr int64_t kRowsPerTask = 64;
// A result of so many bytes (in float32) goes past the cache: it does not fit in a core's L2 cache
// beside what it is made from, so that its lines would come from memory only to be overwritten.
inline constexpr int64_t kLargeBytes = int64_t{1} << 20;
// Of a channel in one tensor: so many bytes wait in the L2 cache while the channel before it is
// worked on, a few tensors' together.
inline constexpr int64_t kAheadBytes = int64_t{64} << 10;
// Values below which another thread costs more than it brings.
inline constexpr int64_t kGrain = 32768;

template <class T>
const Loops<T>& loops() {
#ifdef SYNCBN_HAVE_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) {
    if constexpr (std::is_same_v<T, float>) {
      return avx2::float_loops();
    } else {
      return avx2::double_loops();
    }
  }
#endif
  if constexpr (std::is_same_v<T, float>) {
    return baseline::float_loops();
  } else {
    return baseline::double_loops();
  }
}

/// How the values of a tensor [N, C, ...] lie: as planes of one channel each, or as rows of all
/// channels.
struct Shape {
  int64_t n, c, s;
  bool rows;
  bool large;  ///< for the cache
  at::MemoryFormat format;

  explicit Shape(const at::Tensor& input)
      : n(input.size(0)),
        c(input.size(1)),
        s(1),
        rows(input.dim() == 2),
        large(input.numel() * static_cast<int64_t>(sizeof(float)) >= kLargeBytes),
        format(at::MemoryFormat::Contiguous) {
    for (int64_t dim = 2; dim < input.dim(); ++dim) s *= input.size(dim);
    const at::MemoryFormat suggested = input.suggest_memory_format();
    if (suggested == at::MemoryFormat::ChannelsLast ||
        suggested == at::MemoryFormat::ChannelsLast3d) {
      rows = true;
      format = suggested;
    }
  }
};

/// How many planes, or rows of all channels, a tensor has, and the values of each.
struct Runs {
  int64_t count, values;
};
inline Runs runs_of(const Shape& shape) {
  return shape.rows ? Runs{shape.n * shape.s, shape.c} : Runs{shape.n * shape.c, shape.s};
}

/// float16 and bfloat16 are computed in float32.
inline at::ScalarType compute_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline at::Tensor dense(const at::Tensor& tensor, const Shape& shape, at::ScalarType type) {
  return tensor.to(type).contiguous(shape.format);
}

template <class Run>
void with_type(at::ScalarType type, Run run) {
  if (type == at::kDouble) {
    run(double{});
  } else {
    run(float{});
  }
}

/// Calls run(begin, end) for parts of at least `grain` that cover [0, end), from ATen's threads.
void parallel_for(int64_t end, int64_t grain, c10::function_ref<void(int64_t, int64_t)> run);

/// Calls run(part) for parts that cover the tensor, from ATen's threads.
template <class Run>
void for_planes(const Shape& shape, Run run) {
  const int64_t per_channel = std::max<int64_t>(1, shape.n * shape.s);
  parallel_for(shape.c, std::max<int64_t>(1, kGrain / per_channel),
               [&](int64_t begin, int64_t end) {
                 run(Planes{shape.n, shape.c, shape.s, begin, end, shape.large});
               });
}

/// The same channel by channel, for what goes over each twice: run(part, channel).
template <class Run>
void for_channels(const Shape& shape, Run run) {
  const bool ahead = shape.n * shape.s * static_cast<int64_t>(sizeof(float)) <= kAheadBytes;
  for_planes(shape, [&](const Planes& part) {
    for (int64_t c = part.begin; c < part.end; ++c) {
      run(Planes{part.n, part.c, part.s, c, c + 1, part.stream, ahead && c + 1 < part.end}, c);
    }
  });
}

inline int64_t rows_per_task(const Shape& shape) {
  return std::max(kRowsPerTask, kValuesPerTask / std::max<int64_t>(1, shape.c));
}

/// How often for_rows() calls.
inline int64_t row_tasks(const Shape& shape) {
  const int64_t per_task = rows_per_task(shape);
  return (shape.n * shape.s + per_task - 1) / per_task;
}

inline Rows rows_of_task(const Shape& shape, int64_t task) {
  const int64_t first = task * rows_per_task(shape);
  const int64_t last = std::min(first + rows_per_task(shape), shape.n * shape.s);
  return {shape.c, first, last, shape.large};
}

/// The same for rows; run(part, task) also gets the number of the task.
template <class Run>
void for_rows(const Shape& shape, Run run) {
  parallel_for(row_tasks(shape), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) run(rows_of_task(shape, task), task);
  });
}

/// The same, the other way round, for the second time that a tensor is read: what was read last is
/// still in the cache.
template <class Run>
void for_rows_again(const Shape& shape, Run run) {
  parallel_for(row_tasks(shape), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = end; task-- > begin;) run(rows_of_task(shape, task));
  });
}

/// For results: like at::empty_like(), and large ones ask for huge pages, since most of the time of
/// a layer may otherwise go into the page faults of what it writes to.
at::Tensor empty_like(const at::Tensor& tensor);

}  // namespace syncbn::dist::detail::cpu
