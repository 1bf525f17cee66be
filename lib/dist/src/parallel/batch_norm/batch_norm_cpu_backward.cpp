#include "batch_norm/batch_norm_cpu_kernels.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "batch_norm/batch_norm_cpu_tables.h"
#include "batch_norm/batch_norm_cpu_walk.h"

namespace syncbn::dist::detail::cpu {
namespace {

/// The gradient as the loops take it, which has gone through its gate or has still to.
class Gradient {
 public:
  Gradient(const OutputGradient& gradient, const Shape& shape, at::ScalarType type)
      : dy_(dense(gradient.values, shape, type)), gate_(gradient.gate) {}

  /// What comes out behind the gate is kept; only then it has gone through.
  void keep() {
    if (gate_.defined()) kept_ = cpu::empty_like(dy_);
  }
  OutputGradient kept() const { return {gate_.defined() ? kept_ : dy_, at::Tensor()}; }

  template <class T>
  GradientData<T> data() {
    return {dy_.const_data_ptr<T>(), data_or_null<uint8_t>(gate_),
            kept_.defined() ? kept_.mutable_data_ptr<T>() : nullptr};
  }

 private:
  const at::Tensor dy_, gate_;
  at::Tensor kept_;
};

}  // namespace

at::Tensor pass_gate(const OutputGradient& gradient, const at::Tensor& input) {
  const Shape shape(input);
  const Runs runs = runs_of(shape);
  at::Tensor open = at::empty(input.sizes(), at::kBool, shape.format);
  bool* const values = open.mutable_data_ptr<bool>();
  const uint8_t* const gate = gradient.gate.const_data_ptr<uint8_t>();
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, runs.values));
  parallel_for(runs.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      const uint8_t* const bits = gate + run * gate_bytes(runs.values);
      for (int64_t i = 0; i < runs.values; ++i) {
        values[run * runs.values + i] = is_open(bits, i);
      }
    }
  });
  return at::where(open, gradient.values, at::zeros({}, gradient.values.options()));
}

at::Tensor backward_reduce(OutputGradient& gradient, const at::Tensor& input,
                           const at::Tensor& mean, const at::Tensor& /*invstd*/) {
  const Shape shape(input);
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  Gradient behind_gate(gradient, shape, compute);
  at::Tensor sums = doubles({2 * shape.c});
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    const GradientData<T> grad = behind_gate.data<T>();
    const T* data = x.const_data_ptr<T>();
    const double* center = mean.const_data_ptr<double>();
    double* const sum_dy = sums.mutable_data_ptr<double>();
    double* const sum_dy_xmu = sum_dy + shape.c;
    if (!shape.rows) {
      for_planes(shape, [&](const Planes& part) {
        loops<T>().reduce_planes(grad, data, part, center, sum_dy, sum_dy_xmu);
      });
      return;
    }
    const int64_t tasks = row_tasks(shape);
    const at::Tensor partial = tasks > 1 ? doubles({tasks, 2 * shape.c}) : sums;
    double* const partials = partial.mutable_data_ptr<double>();
    for_rows(shape, [&](const Rows& part, int64_t task) {
      double* const own = partials + task * 2 * shape.c;
      loops<T>().reduce_rows(grad, data, part, center, own, own + shape.c);
    });
    if (tasks == 1) return;
    std::fill_n(sum_dy, 2 * shape.c, 0.0);
    for (int64_t task = 0; task < tasks; ++task) {
      const double* const own = partials + task * 2 * shape.c;
      for (int64_t i = 0; i < 2 * shape.c; ++i) sum_dy[i] += own[i];
    }
  });
  return sums;
}

at::Tensor backward_elementwise(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& mean,
                                const at::Tensor& invstd, const at::Tensor& sums,
                                const at::Tensor& count, bool keep) {
  const Shape shape(input);
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  Gradient behind_gate(gradient, shape, compute);
  if (keep) behind_gate.keep();
  at::Tensor dx = cpu::empty_like(x);
  BackwardTable table(weight, mean, invstd, *count.const_data_ptr<double>());
  const double* const sum_dy = sums.const_data_ptr<double>();
  const double* const sum_dy_xmu = sum_dy + shape.c;
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    for (int64_t c = 0; c < shape.c; ++c) table.set<T>(c, sum_dy[c], sum_dy_xmu[c]);
    const BackwardCoefficients k = table.get();
    T* out = dx.mutable_data_ptr<T>();
    const GradientData<T> grad = behind_gate.data<T>();
    const T* data = x.const_data_ptr<T>();
    if (shape.rows) {
      for_rows_again(
          shape, [&](const Rows& part) { loops<T>().elementwise_rows(grad, data, out, part, k); });
    } else {
      for_planes(shape, [&](const Planes& part) {
        loops<T>().elementwise_planes(grad, data, out, part, k);
      });
    }
  });
  if (keep) gradient = behind_gate.kept();
  return dx.to(input.scalar_type());
}

at::Tensor backward_alone(OutputGradient& gradient, const at::Tensor& input,
                          const at::Tensor& weight, const at::Tensor& mean,
                          const at::Tensor& invstd, const at::Tensor& count, bool keep,
                          at::Tensor& grad_input) {
  const Shape shape(input);
  if (shape.rows) {
    const at::Tensor sums = backward_reduce(gradient, input, mean, invstd);
    grad_input = backward_elementwise(gradient, input, weight, mean, invstd, sums, count, keep);
    return sums;
  }
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  Gradient behind_gate(gradient, shape, compute);
  if (keep) behind_gate.keep();
  at::Tensor dx = cpu::empty_like(x);
  BackwardTable table(weight, mean, invstd, *count.const_data_ptr<double>());
  at::Tensor sums = doubles({2 * shape.c});
  double* const sum_dy = sums.mutable_data_ptr<double>();
  double* const sum_dy_xmu = sum_dy + shape.c;
  const double* center = mean.const_data_ptr<double>();
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    T* out = dx.mutable_data_ptr<T>();
    const GradientData<T> grad = behind_gate.data<T>();
    const T* data = x.const_data_ptr<T>();
    for_channels(shape, [&](const Planes& part, int64_t c) {
      loops<T>().reduce_planes(grad, data, part, center, sum_dy, sum_dy_xmu);
      table.set<T>(c, sum_dy[c], sum_dy_xmu[c]);
      loops<T>().elementwise_planes(grad, data, out, part, table.get());
    });
  });
  if (keep) gradient = behind_gate.kept();
  grad_input = dx.to(input.scalar_type());
  return sums;
}

}  // namespace syncbn::dist::detail::cpu
