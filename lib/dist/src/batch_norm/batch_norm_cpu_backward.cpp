#include "batch_norm/batch_norm_cpu_kernels.h"

#include <algorithm>

#include "batch_norm/batch_norm_cpu_tables.h"
#include "batch_norm/batch_norm_cpu_walk.h"

namespace syncbn::dist::detail::cpu {
namespace {

/// What a ReLU after the layer gave, if there is one, and room for the gradient ahead of it.
class ReluGate {
 public:
  ReluGate(const at::Tensor& output, const Shape& shape, const at::Tensor& x) {
    if (!output.defined()) return;
    output_ = dense(output, shape, x.scalar_type());
    gradient_ = cpu::empty_like(x);
  }
  bool closes() const { return output_.defined(); }
  const at::Tensor& gradient() const { return gradient_; }

  template <class T>
  GateData<T> data() const {
    if (!closes()) return {};
    return {output_.const_data_ptr<T>(), gradient_.mutable_data_ptr<T>()};
  }

 private:
  at::Tensor output_, gradient_;
};

}  // namespace

BackwardSums backward_reduce(at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean,
                             const at::Tensor& /*invstd*/, const at::Tensor& relu_output) {
  const Shape shape(input);
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  const at::Tensor dy = dense(gradient, shape, compute);
  const ReluGate gate(relu_output, shape, x);
  BackwardSums sums{doubles({shape.c}), doubles({shape.c})};
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    const T* grad = dy.const_data_ptr<T>();
    const T* data = x.const_data_ptr<T>();
    const double* center = mean.const_data_ptr<double>();
    double* sum_dy = sums.dy.mutable_data_ptr<double>();
    double* sum_dy_xmu = sums.dy_xmu.mutable_data_ptr<double>();
    const GateData<T> gate_data = gate.data<T>();
    if (!shape.rows) {
      for_planes(shape, [&](const Planes& part) {
        loops<T>().reduce_planes(grad, data, part, center, sum_dy, sum_dy_xmu, gate_data);
      });
      return;
    }
    const int64_t tasks = row_tasks(shape);
    at::Tensor partial = doubles({tasks, 2 * shape.c});
    double* partials = partial.mutable_data_ptr<double>();
    for_rows(shape, [&](const Rows& part, int64_t task) {
      double* own = partials + task * 2 * shape.c;
      loops<T>().reduce_rows(grad, data, part, center, own, own + shape.c, gate_data);
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
  if (gate.closes()) gradient = gate.gradient();
  return sums;
}

at::Tensor backward_elementwise(const at::Tensor& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& mean,
                                const at::Tensor& invstd, const BackwardSums& sums,
                                const at::Tensor& count, bool overwrite) {
  const Shape shape(input);
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  const at::Tensor dy = dense(gradient, shape, compute);
  at::Tensor dx = overwrite ? dy : cpu::empty_like(x);
  BackwardTable table(weight, mean, invstd, *count.const_data_ptr<double>());
  const double* sum_dy = sums.dy.const_data_ptr<double>();
  const double* sum_dy_xmu = sums.dy_xmu.const_data_ptr<double>();
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    for (int64_t c = 0; c < shape.c; ++c) table.set<T>(c, sum_dy[c], sum_dy_xmu[c]);
    const BackwardCoefficients k = table.get();
    T* out = dx.mutable_data_ptr<T>();
    const T* grad = dy.const_data_ptr<T>();
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
  return dx.to(input.scalar_type());
}

BackwardSums backward_alone(at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& mean, const at::Tensor& invstd,
                            const at::Tensor& count, const at::Tensor& relu_output,
                            bool keep_gradient, at::Tensor& grad_input) {
  const Shape shape(input);
  const bool overwrite = relu_output.defined() && !keep_gradient;
  if (shape.rows) {
    BackwardSums sums = backward_reduce(gradient, input, mean, invstd, relu_output);
    grad_input =
        backward_elementwise(gradient, input, weight, mean, invstd, sums, count, overwrite);
    return sums;
  }
  const at::ScalarType compute = compute_type(input);
  const at::Tensor x = dense(input, shape, compute);
  const at::Tensor dy = dense(gradient, shape, compute);
  const ReluGate gate(relu_output, shape, x);
  if (gate.closes()) gradient = gate.gradient();
  at::Tensor dx = overwrite ? gradient : cpu::empty_like(x);
  BackwardTable table(weight, mean, invstd, *count.const_data_ptr<double>());
  BackwardSums sums{doubles({shape.c}), doubles({shape.c})};
  double* sum_dy = sums.dy.mutable_data_ptr<double>();
  double* sum_dy_xmu = sums.dy_xmu.mutable_data_ptr<double>();
  const double* center = mean.const_data_ptr<double>();
  with_type(compute, [&](auto type) {
    using T = decltype(type);
    T* out = dx.mutable_data_ptr<T>();
    const T* grad = dy.const_data_ptr<T>();
    const T* data = x.const_data_ptr<T>();
    const GateData<T> gate_data = gate.data<T>();
    const T* through_gate = gate.closes() ? gate_data.gradient : grad;
    for_planes(shape, [&](const Planes& part) {
      for (int64_t c = part.begin; c < part.end; ++c) {
        const Planes one{part.n, part.c, part.s, c, c + 1, part.stream};
        loops<T>().reduce_planes(grad, data, one, center, sum_dy, sum_dy_xmu, gate_data);
        table.set<T>(c, sum_dy[c], sum_dy_xmu[c]);
        loops<T>().elementwise_planes(through_gate, data, out, one, table.get());
      }
    });
  });
  grad_input = dx.to(input.scalar_type());
  return sums;
}

}  // namespace syncbn::dist::detail::cpu
