#include "batch_norm/batch_norm_cpu_kernels.h"

#include <algorithm>
#include <cmath>

#include <ATen/ops/full.h>

#include "batch_norm/batch_norm_cpu_tables.h"
#include "batch_norm/batch_norm_cpu_walk.h"

namespace syncbn::dist::detail::cpu {
namespace {

/// What normalising writes, and what it adds, as the loops take them.
class Result {
 public:
  Result(const at::Tensor& x, const Shape& shape, const Epilogue& epilogue)
      : residual_(epilogue.residual.defined() ? dense(epilogue.residual, shape, x.scalar_type())
                                              : at::Tensor()),
        output_{cpu::empty_like(x), epilogue.relu ? empty_gate(shape) : at::Tensor()} {}

  template <class T>
  T* values() {
    return output_.values.mutable_data_ptr<T>();
  }
  template <class T>
  EpilogueData<T> epilogue() {
    uint8_t* const gate =
        output_.gate.defined() ? output_.gate.mutable_data_ptr<uint8_t>() : nullptr;
    return {data_or_null<T>(residual_), gate};
  }
  Output as(at::ScalarType type) const { return {output_.values.to(type), output_.gate}; }

 private:
  static at::Tensor empty_gate(const Shape& shape) {
    const Runs runs = runs_of(shape);
    return at::empty({runs.count, gate_bytes(runs.values)}, at::kByte);
  }

  const at::Tensor residual_;
  Output output_;
};

}  // namespace

at::Tensor moments(const at::Tensor& input) {
  const Shape shape(input);
  const int64_t width = 2 * shape.c + 1;
  if (shape.c == 0) return at::full({1}, 0.0, at::kDouble);
  const int64_t tasks = shape.rows ? row_tasks(shape) : 1;
  at::Tensor result = doubles({width});
  const at::Tensor partial = tasks > 1 ? doubles({tasks, width}) : result;
  double* const mean = partial.mutable_data_ptr<double>();
  double* const m2 = mean + shape.c;
  if (tasks == 0) std::fill_n(mean, width, 0.0);
  const at::Tensor x = dense(input, shape, compute_type(input));
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* data = x.const_data_ptr<T>();
    if (!shape.rows) {
      for_planes(shape,
                 [&](const Planes& part) { loops<T>().moments_planes(data, part, mean, m2); });
      mean[width - 1] = static_cast<double>(shape.n * shape.s);
      return;
    }
    for_rows(shape, [&](const Rows& part, int64_t task) {
      double* const own = mean + task * width;
      loops<T>().moments_rows(data, part, own, own + shape.c);
      own[width - 1] = static_cast<double>(part.end - part.begin);
    });
  });
  if (tasks > 1) {
    double* const all = result.mutable_data_ptr<double>();
    all[width - 1] = merge_rows(mean, tasks, width, shape.c, all, all + shape.c);
  }
  return result;
}

Output transform(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                 const at::Tensor& mean, const at::Tensor& invstd, const Epilogue& epilogue) {
  const Shape shape(input);
  const at::Tensor x = dense(input, shape, compute_type(input));
  Result result(x, shape, epilogue);
  ForwardTable table(weight, bias, shape.c);
  const double* center = mean.const_data_ptr<double>();
  const double* inverse = invstd.const_data_ptr<double>();
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    for (int64_t c = 0; c < shape.c; ++c) table.set<T>(c, center[c], inverse[c]);
    const ForwardCoefficients k = table.with(center);
    const T* in = x.const_data_ptr<T>();
    T* out = result.values<T>();
    const EpilogueData<T> then = result.epilogue<T>();
    if (shape.rows) {
      for_rows_again(shape,
                     [&](const Rows& part) { loops<T>().transform_rows(in, out, part, k, then); });
    } else {
      for_planes(shape,
                 [&](const Planes& part) { loops<T>().transform_planes(in, out, part, k, then); });
    }
  });
  return result.as(input.scalar_type());
}

MergedMoments normalize_alone(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& bias, double eps, const Epilogue& epilogue,
                              Output& output) {
  const Shape shape(input);
  if (shape.rows) {
    MergedMoments own = merge(moments(input).unsqueeze_(0), shape.c);
    output = transform(input, weight, bias, own.mean, inverse_deviation(own, eps), epilogue);
    return own;
  }
  const auto count = static_cast<double>(shape.n * shape.s);
  MergedMoments merged{doubles({shape.c}), doubles({shape.c}), at::full({}, count, at::kDouble)};
  const at::Tensor x = dense(input, shape, compute_type(input));
  Result result(x, shape, epilogue);
  ForwardTable table(weight, bias, shape.c);
  double* mean = merged.mean.mutable_data_ptr<double>();
  double* m2 = merged.m2.mutable_data_ptr<double>();
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* in = x.const_data_ptr<T>();
    T* out = result.values<T>();
    const EpilogueData<T> then = result.epilogue<T>();
    for_channels(shape, [&](const Planes& part, int64_t c) {
      loops<T>().moments_planes(in, part, mean, m2);
      table.set<T>(c, mean[c], 1 / std::sqrt(m2[c] / std::max(count, 1.0) + eps));
      loops<T>().transform_planes(in, out, part, table.with(mean), then);
    });
  });
  output = result.as(input.scalar_type());
  return merged;
}

}  // namespace syncbn::dist::detail::cpu
