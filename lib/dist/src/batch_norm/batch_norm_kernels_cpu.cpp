#include "batch_norm/batch_norm_kernels_cpu.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include "batch_norm/batch_norm_cpu_loops.h"
#include "batch_norm/batch_norm_cpu_tables.h"

namespace syncbn::dist::detail {
namespace {

using cpu::BackwardTable;
using cpu::doubles;
using cpu::ForwardTable;
using cpu::Planes;
using cpu::Rows;

// Rows that make one task: fixed, so that results do not depend on the number of threads.
constexpr int64_t kRowsPerTask = 2048;
// Values below which another thread costs more than it brings.
constexpr int64_t kGrain = 32768;

template <class T>
const cpu::Loops<T>& loops() {
#ifdef SYNCBN_HAVE_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) {
    if constexpr (std::is_same_v<T, float>) {
      return cpu::avx2::float_loops();
    } else {
      return cpu::avx2::double_loops();
    }
  }
#endif
  if constexpr (std::is_same_v<T, float>) {
    return cpu::baseline::float_loops();
  } else {
    return cpu::baseline::double_loops();
  }
}

/// How the values of a tensor [N, C, ...] lie: as planes of one channel each, or as rows of all
/// channels.
struct Shape {
  int64_t n, c, s;
  bool rows;
  at::MemoryFormat format;

  explicit Shape(const at::Tensor& input)
      : n(input.size(0)),
        c(input.size(1)),
        s(1),
        rows(input.dim() == 2),
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

/// float16 and bfloat16 are computed in float32.
at::ScalarType compute_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor dense(const at::Tensor& tensor, const Shape& shape, at::ScalarType type) {
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

/// Calls run(part) for parts that cover the tensor, from ATen's threads.
template <class Run>
void for_planes(const Shape& shape, Run run) {
  const int64_t per_channel = std::max<int64_t>(1, shape.n * shape.s);
  at::parallel_for(0, shape.c, std::max<int64_t>(1, kGrain / per_channel),
                   [&](int64_t begin, int64_t end) {
                     run(Planes{shape.n, shape.c, shape.s, begin, end});
                   });
}

/// The same for rows; run(part, task) also gets the number of the task.
template <class Run>
int64_t for_rows(const Shape& shape, Run run) {
  const int64_t rows = shape.n * shape.s;
  const int64_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * kRowsPerTask;
      run(Rows{shape.c, first, std::min(first + kRowsPerTask, rows)}, task);
    }
  });
  return tasks;
}

MergedMoments merge(const at::Tensor& gathered) {
  const int64_t ranks = gathered.size(0);
  const int64_t c_size = (gathered.size(1) - 1) / 2;
  const int64_t stride = gathered.stride(0);
  const double* in = gathered.const_data_ptr<double>();
  MergedMoments merged{doubles({c_size}), doubles({c_size}), doubles({})};
  double total = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) total += in[rank * stride + 2 * c_size];
  *merged.count.mutable_data_ptr<double>() = total;
  double* mean = merged.mean.mutable_data_ptr<double>();
  double* m2 = merged.m2.mutable_data_ptr<double>();
  std::fill_n(mean, c_size, 0.0);
  std::fill_n(m2, c_size, 0.0);
  if (total == 0) return merged;
  // Ranks without values sent arbitrary statistics: a factor of 0 would not hide a NaN.
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const double* one = in + rank * stride;
    const double count = one[2 * c_size];
    if (count == 0) continue;
    for (int64_t c = 0; c < c_size; ++c) mean[c] += one[c] * (count / total);
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const double* one = in + rank * stride;
    const double count = one[2 * c_size];
    if (count == 0) continue;
    for (int64_t c = 0; c < c_size; ++c) {
      const double delta = one[c] - mean[c];
      m2[c] += one[c_size + c] + count * delta * delta;
    }
  }
  return merged;
}

Moments moments(const at::Tensor& input) {
  const Shape shape(input);
  Moments result{doubles({shape.c}), doubles({shape.c})};
  const at::Tensor x = dense(input, shape, compute_type(input));
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* data = x.const_data_ptr<T>();
    double* mean = result.mean.mutable_data_ptr<double>();
    double* m2 = result.m2.mutable_data_ptr<double>();
    if (!shape.rows) {
      for_planes(shape,
                 [&](const Planes& part) { loops<T>().moments_planes(data, part, mean, m2); });
      return;
    }
    const int64_t rows = shape.n * shape.s;
    const int64_t most = std::max<int64_t>(1, (rows + kRowsPerTask - 1) / kRowsPerTask);
    const int64_t width = 2 * shape.c + 1;
    at::Tensor partial = doubles({most, width});
    double* partials = partial.mutable_data_ptr<double>();
    partials[width - 1] = 0;
    for_rows(shape, [&](const Rows& part, int64_t task) {
      double* own = partials + task * width;
      loops<T>().moments_rows(data, part, own, own + shape.c);
      own[width - 1] = static_cast<double>(part.end - part.begin);
    });
    const MergedMoments all = merge(partial);
    result = {all.mean, all.m2};
  });
  return result;
}

at::Tensor transform(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const at::Tensor& mean, const at::Tensor& invstd) {
  const Shape shape(input);
  const at::Tensor x = dense(input, shape, compute_type(input));
  at::Tensor y = at::empty_like(x);
  ForwardTable table(weight, bias, shape.c);
  const double* center = mean.const_data_ptr<double>();
  const double* inverse = invstd.const_data_ptr<double>();
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    for (int64_t c = 0; c < shape.c; ++c) table.set<T>(c, center[c], inverse[c]);
    const cpu::ForwardCoefficients k = table.with(center);
    const T* in = x.const_data_ptr<T>();
    T* out = y.mutable_data_ptr<T>();
    if (shape.rows) {
      for_rows(shape,
               [&](const Rows& part, int64_t) { loops<T>().transform_rows(in, out, part, k); });
    } else {
      for_planes(shape, [&](const Planes& part) { loops<T>().transform_planes(in, out, part, k); });
    }
  });
  return y.to(input.scalar_type());
}

MergedMoments normalize_alone(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& bias, double eps, at::Tensor& output) {
  const Shape shape(input);
  const auto count = static_cast<double>(shape.n * shape.s);
  MergedMoments merged{doubles({shape.c}), doubles({shape.c}), at::full({}, count, at::kDouble)};
  if (shape.rows) {
    const Moments own = moments(input);
    merged.mean = own.mean;
    merged.m2 = own.m2;
    output = transform(input, weight, bias, merged.mean, inverse_deviation(merged, eps));
    return merged;
  }
  const at::Tensor x = dense(input, shape, compute_type(input));
  at::Tensor y = at::empty_like(x);
  ForwardTable table(weight, bias, shape.c);
  double* mean = merged.mean.mutable_data_ptr<double>();
  double* m2 = merged.m2.mutable_data_ptr<double>();
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.const_data_ptr<T>();
    T* out = y.mutable_data_ptr<T>();
    for_planes(shape, [&](const Planes& part) {
      for (int64_t c = part.begin; c < part.end; ++c) {
        const Planes one{part.n, part.c, part.s, c, c + 1};
        loops<T>().moments_planes(in, one, mean, m2);
        table.set<T>(c, mean[c], 1 / std::sqrt(m2[c] / std::max(count, 1.0) + eps));
        loops<T>().transform_planes(in, out, one, table.with(mean));
      }
    });
  });
  output = y.to(input.scalar_type());
  return merged;
}

BackwardSums backward_reduce(const at::Tensor& grad_output, const at::Tensor& input,
                             const at::Tensor& mean, const at::Tensor& /*invstd*/) {
  const Shape shape(input);
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  const at::Tensor dy = dense(grad_output, shape, compute);
  BackwardSums sums{doubles({shape.c}), doubles({shape.c})};
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    const T* gradient = dy.const_data_ptr<T>();
    const T* data = x.const_data_ptr<T>();
    const double* center = mean.const_data_ptr<double>();
    double* sum_dy = sums.dy.mutable_data_ptr<double>();
    double* sum_dy_xmu = sums.dy_xmu.mutable_data_ptr<double>();
    if (!shape.rows) {
      for_planes(shape, [&](const Planes& part) {
        loops<T>().reduce_planes(gradient, data, part, center, sum_dy, sum_dy_xmu);
      });
      return;
    }
    const int64_t rows = shape.n * shape.s;
    const int64_t most = std::max<int64_t>(1, (rows + kRowsPerTask - 1) / kRowsPerTask);
    at::Tensor partial = doubles({most, 2 * shape.c});
    double* partials = partial.mutable_data_ptr<double>();
    const int64_t tasks = for_rows(shape, [&](const Rows& part, int64_t task) {
      double* own = partials + task * 2 * shape.c;
      loops<T>().reduce_rows(gradient, data, part, center, own, own + shape.c);
    });
    std::fill_n(sum_dy, shape.c, 0.0);
    std::fill_n(sum_dy_xmu, shape.c, 0.0);
    for (int64_t task = 0; task < tasks; ++task) {
      const double* own = partials + task * 2 * shape.c;
      for (int64_t c = 0; c < shape.c; ++c) {
        sum_dy[c] += own[c];
        sum_dy_xmu[c] += own[shape.c + c];
      }
    }
  });
  return sums;
}

at::Tensor backward_elementwise(const at::Tensor& grad_output, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& mean,
                                const at::Tensor& invstd, const BackwardSums& sums,
                                const at::Tensor& count) {
  const Shape shape(input);
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  const at::Tensor dy = dense(grad_output, shape, compute);
  at::Tensor dx = at::empty_like(x);
  BackwardTable table(weight, mean, invstd, *count.const_data_ptr<double>());
  const double* sum_dy = sums.dy.const_data_ptr<double>();
  const double* sum_dy_xmu = sums.dy_xmu.const_data_ptr<double>();
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    for (int64_t c = 0; c < shape.c; ++c) table.set<T>(c, sum_dy[c], sum_dy_xmu[c]);
    const cpu::BackwardCoefficients k = table.get();
    const T* gradient = dy.const_data_ptr<T>();
    const T* data = x.const_data_ptr<T>();
    T* out = dx.mutable_data_ptr<T>();
    if (shape.rows) {
      for_rows(shape, [&](const Rows& part, int64_t) {
        loops<T>().elementwise_rows(gradient, data, out, part, k);
      });
    } else {
      for_planes(shape, [&](const Planes& part) {
        loops<T>().elementwise_planes(gradient, data, out, part, k);
      });
    }
  });
  return dx.to(input.scalar_type());
}

BackwardSums backward_alone(const at::Tensor& grad_output, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& mean,
                            const at::Tensor& invstd, const at::Tensor& count,
                            at::Tensor& grad_input) {
  const Shape shape(input);
  if (shape.rows) {
    BackwardSums sums = backward_reduce(grad_output, input, mean, invstd);
    grad_input = backward_elementwise(grad_output, input, weight, mean, invstd, sums, count);
    return sums;
  }
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  const at::Tensor dy = dense(grad_output, shape, compute);
  at::Tensor dx = at::empty_like(x);
  BackwardTable table(weight, mean, invstd, *count.const_data_ptr<double>());
  BackwardSums sums{doubles({shape.c}), doubles({shape.c})};
  double* sum_dy = sums.dy.mutable_data_ptr<double>();
  double* sum_dy_xmu = sums.dy_xmu.mutable_data_ptr<double>();
  const double* center = mean.const_data_ptr<double>();
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    const T* gradient = dy.const_data_ptr<T>();
    const T* data = x.const_data_ptr<T>();
    T* out = dx.mutable_data_ptr<T>();
    for_planes(shape, [&](const Planes& part) {
      for (int64_t c = part.begin; c < part.end; ++c) {
        const Planes one{part.n, part.c, part.s, c, c + 1};
        loops<T>().reduce_planes(gradient, data, one, center, sum_dy, sum_dy_xmu);
        table.set<T>(c, sum_dy[c], sum_dy_xmu[c]);
        loops<T>().elementwise_planes(gradient, data, out, one, table.get());
      }
    });
  });
  grad_input = dx.to(input.scalar_type());
  return sums;
}

}  // namespace

const BatchNormKernels& batch_norm_kernels_cpu() {
  static const BatchNormKernels kernels{
      moments,         merge,         transform, backward_reduce, backward_elementwise,
      normalize_alone, backward_alone};
  return kernels;
}

}  // namespace syncbn::dist::detail
