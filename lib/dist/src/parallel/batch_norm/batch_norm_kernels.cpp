// The CPU kernels, and the choice of kernels by device. Plain loops do the work per channel: with
// cold caches, as in a training step, an ATen operator costs more than the arithmetic.

#include "batch_norm/batch_norm_kernels.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/heap.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "batch_norm/batch_norm_cpu_walk.h"

namespace syncbn::dist::detail {
namespace cpu {

// at::parallel_for is a template that uses one thread in files that are compiled without OpenMP.
void parallel_for(int64_t end, int64_t grain, c10::function_ref<void(int64_t, int64_t)> run) {
  at::parallel_for(0, end, grain, run);
}

namespace {

at::Tensor doubles(at::IntArrayRef size) {
  return at::empty(size, at::kDouble);
}

/// Requests huge pages for a large result: page faults could take most of a layer's time.
at::Tensor empty_result(const at::Tensor& like) {
  at::Tensor result = at::empty_like(like);
  base::advise_huge_pages(result.mutable_data_ptr(), result.nbytes());
  return result;
}

template <class T>
const T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

/// A layer's parameter per channel; `otherwise` for a layer without it.
std::vector<double> as_doubles(const at::Tensor& parameter, int64_t channels, double otherwise) {
  if (!parameter.defined()) return std::vector<double>(channels, otherwise);
  const auto copy = [](const auto* from, int64_t n) { return std::vector<double>(from, from + n); };
  if (parameter.is_contiguous() && parameter.scalar_type() == at::kFloat) {
    return copy(parameter.const_data_ptr<float>(), parameter.numel());
  }
  const at::Tensor values = parameter.detach().to(at::kDouble).contiguous();
  return copy(values.const_data_ptr<double>(), values.numel());
}

/// Coefficients of y = (x - center) * scale + shift, by channel.
class ForwardTable {
 public:
  ForwardTable(const at::Tensor& weight, const at::Tensor& bias, int64_t channels)
      : weight_(as_doubles(weight, channels, 1)),
        bias_(as_doubles(bias, channels, 0)),
        scale_(channels),
        shift_(channels) {}

  template <class T>
  void set(int64_t c, double mean, double invstd) {
    scale_[c] = invstd * weight_[c];
    // The loops round the mean to T: the shift compensates for the difference.
    const double rounding = mean - static_cast<double>(static_cast<T>(mean));
    shift_[c] = bias_[c] - rounding * scale_[c];
  }
  ForwardCoefficients with(const double* center) const {
    return {center, scale_.data(), shift_.data()};
  }

 private:
  const std::vector<double> weight_, bias_;
  std::vector<double> scale_, shift_;
};

/// Coefficients of dx = (dy - offset) * scale + (x - center) * slope, by channel.
class BackwardTable {
 public:
  BackwardTable(const at::Tensor& weight, const at::Tensor& moments, const at::Tensor& invstd)
      : weight_(as_doubles(weight, invstd.size(0), 1)),
        mean_(moments.const_data_ptr<double>()),
        count_(mean_[2 * invstd.size(0)]),
        invstd_(invstd.const_data_ptr<double>()),
        scale_(invstd.size(0)),
        offset_(invstd.size(0)),
        slope_(invstd.size(0)) {}

  template <class T>
  void set(int64_t c, double sum_dy, double sum_dy_xmu) {
    scale_[c] = invstd_[c] * weight_[c];
    slope_[c] = -scale_[c] * invstd_[c] * invstd_[c] * sum_dy_xmu / count_;
    offset_[c] = sum_dy / count_;
    // The loops round the mean to T: the offset compensates. If the scale is 0, so is the slope.
    const double rounding = mean_[c] - static_cast<double>(static_cast<T>(mean_[c]));
    if (scale_[c] != 0) offset_[c] += rounding * slope_[c] / scale_[c];
  }
  BackwardCoefficients get() const { return {mean_, scale_.data(), offset_.data(), slope_.data()}; }

 private:
  const std::vector<double> weight_;
  const double* const mean_;
  const double count_;
  const double* const invstd_;
  std::vector<double> scale_, offset_, slope_;
};

/// Merges rows of moments as BatchNormKernels::merge does.
/// @return the total count.
double merge_rows(const double* rows, int64_t count_of_rows, int64_t stride, int64_t channels,
                  double* mean, double* m2) {
  double total = 0;
  for (int64_t i = 0; i < count_of_rows; ++i) total += rows[i * stride + 2 * channels];
  std::fill_n(mean, channels, 0.0);
  std::fill_n(m2, channels, 0.0);
  if (total == 0) return total;
  // Skip rows with count 0: they may hold NaN, which a factor of 0 would not remove.
  for (int64_t i = 0; i < count_of_rows; ++i) {
    const double* const row = rows + i * stride;
    const double count = row[2 * channels];
    if (count == 0) continue;
    for (int64_t c = 0; c < channels; ++c) mean[c] += row[c] * (count / total);
  }
  for (int64_t i = 0; i < count_of_rows; ++i) {
    const double* const row = rows + i * stride;
    const double count = row[2 * channels];
    if (count == 0) continue;
    for (int64_t c = 0; c < channels; ++c) {
      const double delta = row[c] - mean[c];
      m2[c] += row[channels + c] + count * delta * delta;
    }
  }
  return total;
}

at::Tensor moments(const at::Tensor& input, double /*eps*/) {
  const Shape shape(input);
  const int64_t width = 2 * shape.c + 1;
  if (shape.c == 0) return at::full({1}, 0.0, at::kDouble);
  const int64_t tasks = shape.rows ? row_tasks(shape) : 1;
  at::Tensor result = doubles({width});
  const at::Tensor partial = tasks > 1 ? doubles({tasks, width}) : result;
  double* const mean = partial.mutable_data_ptr<double>();
  double* const m2 = mean + shape.c;
  if (tasks == 0) std::fill_n(mean, width, 0.0);
  const at::Tensor x = dense(input, shape);
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

at::Tensor merge(const at::Tensor& rows, int64_t channels, double /*eps*/) {
  at::Tensor merged = doubles({2 * channels + 1});
  double* const mean = merged.mutable_data_ptr<double>();
  mean[2 * channels] = merge_rows(rows.const_data_ptr<double>(), rows.size(0), rows.stride(0),
                                  channels, mean, mean + channels);
  return merged;
}

at::Tensor inverse_deviation(const at::Tensor& moments, int64_t channels, double eps) {
  at::Tensor result = doubles({channels});
  const double* const m2 = moments.const_data_ptr<double>() + channels;
  const double count = std::max(m2[channels], 1.0);
  double* const values = result.mutable_data_ptr<double>();
  for (int64_t c = 0; c < channels; ++c) values[c] = 1 / std::sqrt(m2[c] / count + eps);
  return result;
}

/// Sets a tensor [C], in place, to change(value of channel c, c).
template <class Change>
void change_channels(const at::Tensor& tensor, Change change) {
  if (!tensor.defined()) return;
  const bool directly = tensor.is_cpu() && tensor.is_contiguous() &&
                        (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble);
  // Tells autograd about the change, as an operator does; throws for an inference tensor.
  if (directly) tensor.unsafeGetTensorImpl()->bump_version();
  const at::Tensor values = directly ? tensor : tensor.to(at::kDouble).contiguous();
  with_type(values.scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* const data = values.mutable_data_ptr<T>();
    for (int64_t c = 0; c < values.numel(); ++c) {
      data[c] = static_cast<T>(change(static_cast<double>(data[c]), c));
    }
  });
  if (!directly) tensor.copy_(values);
}

/// @return the incremented counter.
double increment(const at::Tensor& counter) {
  // Module::to(dtype) turns it into a floating-point number.
  if (!counter.is_cpu() || counter.scalar_type() != at::kLong) {
    counter.add_(1);
    return counter.item<double>();
  }
  counter.unsafeGetTensorImpl()->bump_version();
  return static_cast<double>(++*counter.mutable_data_ptr<int64_t>());
}

void update_running(const RunningStatistics& running, const at::Tensor& moments, int64_t channels) {
  const double* const mean = moments.const_data_ptr<double>();
  const double* const m2 = mean + channels;
  const double count = m2[channels];
  if (count < 2) return;
  double momentum = running.momentum.value_or(0);
  if (running.num_batches_tracked.defined()) {
    const double batches = increment(running.num_batches_tracked);
    if (!running.momentum) momentum = 1 / batches;
  }
  const auto blend = [momentum](double before, double batch) {
    return (1 - momentum) * before + momentum * batch;
  };
  change_channels(running.mean, [&](double before, int64_t c) { return blend(before, mean[c]); });
  change_channels(running.var,
                  [&](double before, int64_t c) { return blend(before, m2[c] / (count - 1)); });
}

/// Makes the output by run(x, y, epilogue), with pointers to the input, the output and the operands
/// of the epilogue.
template <class Run>
Output make_output(const at::Tensor& input, const Shape& shape, const Epilogue& epilogue, Run run) {
  const at::Tensor x = dense(input, shape);
  at::Tensor y = empty_result(x);
  at::Tensor residual, mask;
  if (epilogue.residual.defined()) residual = dense(epilogue.residual, shape);
  const Runs runs(shape);
  if (epilogue.relu) mask = at::empty({runs.count, mask_bytes(runs.values)}, at::kByte);
  with_type(shape.compute_type, [&](auto type) {
    using T = decltype(type);
    const EpilogueData<T> operands{data_or_null<T>(residual),
                                   epilogue.relu ? mask.mutable_data_ptr<uint8_t>() : nullptr};
    run(x.const_data_ptr<T>(), y.mutable_data_ptr<T>(), operands);
  });
  return {y.to(input.scalar_type()), mask};
}

Output transform(const at::Tensor& input, const Shape& shape, const at::Tensor& moments,
                 const at::Tensor& invstd, const ForwardOptions& options) {
  ForwardTable table(options.weight, options.bias, shape.c);
  const double* center = moments.const_data_ptr<double>();
  const double* inverse = invstd.const_data_ptr<double>();
  const auto run = [&]<class T>(const T* x, T* y, EpilogueData<T> operands) {
    for (int64_t c = 0; c < shape.c; ++c) table.set<T>(c, center[c], inverse[c]);
    const ForwardCoefficients k = table.with(center);
    if (shape.rows) {
      for_rows_reversed(
          shape, [&](const Rows& part) { loops<T>().transform_rows(x, y, part, k, operands); });
    } else {
      for_planes(shape,
                 [&](const Planes& part) { loops<T>().transform_planes(x, y, part, k, operands); });
    }
  };
  return make_output(input, shape, options.epilogue, run);
}

Normalized forward(const at::Tensor& input, const at::Tensor& rows, const ForwardOptions& options) {
  const Shape shape(input);
  Normalized result{.moments = merge(rows, shape.c, options.eps)};
  update_running(options.running, result.moments, shape.c);
  result.invstd = inverse_deviation(result.moments, shape.c, options.eps);
  result.output = transform(input, shape, result.moments, result.invstd, options);
  return result;
}

Normalized fused_local_forward(const at::Tensor& input, const ForwardOptions& options) {
  const Shape shape(input);
  if (shape.rows) return forward(input, moments(input, options.eps).unsqueeze_(0), options);
  Normalized result{.moments = doubles({2 * shape.c + 1})};
  double* const mean = result.moments.mutable_data_ptr<double>();
  double* const m2 = mean + shape.c;
  const auto count = static_cast<double>(shape.n * shape.s);
  m2[shape.c] = count;
  ForwardTable table(options.weight, options.bias, shape.c);
  const auto run = [&]<class T>(const T* x, T* y, EpilogueData<T> operands) {
    for_channels(shape, [&](const Planes& part, int64_t c) {
      loops<T>().moments_planes(x, part, mean, m2);
      table.set<T>(c, mean[c], 1 / std::sqrt(m2[c] / std::max(count, 1.0) + options.eps));
      loops<T>().transform_planes(x, y, part, table.with(mean), operands);
    });
  };
  result.output = make_output(input, shape, options.epilogue, run);
  update_running(options.running, result.moments, shape.c);
  result.invstd = inverse_deviation(result.moments, shape.c, options.eps);
  return result;
}

/// @param sums as in GradientSums
ParameterGradients parameter_gradients(const at::Tensor& sums, const at::Tensor& invstd,
                                       std::optional<at::ScalarType> type) {
  if (!type) return {};
  const int64_t channels = invstd.numel();
  const double* const sum_dy = sums.const_data_ptr<double>();
  const double* const sum_dy_xmu = sum_dy + channels;
  const double* const inverse = invstd.const_data_ptr<double>();
  const auto options = at::TensorOptions().dtype(type == at::kDouble ? at::kDouble : at::kFloat);
  ParameterGradients result{at::empty({channels}, options), at::empty({channels}, options)};
  with_type(result.weight.scalar_type(), [&](auto one) {
    using T = decltype(one);
    T* const weight = result.weight.mutable_data_ptr<T>();
    T* const bias = result.bias.mutable_data_ptr<T>();
    for (int64_t c = 0; c < channels; ++c) {
      weight[c] = static_cast<T>(sum_dy_xmu[c] * inverse[c]);
      bias[c] = static_cast<T>(sum_dy[c]);
    }
  });
  return result;
}

/// GradientSums::sums of this input alone.
at::Tensor sum_gradient(const OutputGradient& gradient, const at::Tensor& input,
                        const at::Tensor& moments) {
  const Shape shape(input);
  const at::Tensor x = dense(input, shape);
  const at::Tensor dy = dense(gradient.values, shape);
  at::Tensor sums = doubles({2 * shape.c});
  with_type(shape.compute_type, [&](auto type) {
    using T = decltype(type);
    const GradientData<T> grad{dy.const_data_ptr<T>(), data_or_null<uint8_t>(gradient.relu_mask)};
    const T* data = x.const_data_ptr<T>();
    const double* center = moments.const_data_ptr<double>();
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

GradientSums backward_reduce(const OutputGradient& gradient, const at::Tensor& input,
                             const at::Tensor& /*weight*/, const at::Tensor& moments,
                             const at::Tensor& invstd, const at::Tensor& before,
                             std::optional<at::ScalarType> parameter_type) {
  at::Tensor sums = sum_gradient(gradient, input, moments);
  if (before.defined()) sums.add_(before);
  return {sums, parameter_gradients(sums, invstd, parameter_type)};
}

/// Makes the gradient of the input by run(gradient, x, dx), with pointers to the gradient of the
/// output, the input and the result.
/// @param keep as for backward_elementwise
template <class Run>
at::Tensor make_input_gradient(OutputGradient& gradient, const at::Tensor& input,
                               const Shape& shape, bool keep, Run run) {
  const at::Tensor x = dense(input, shape);
  const at::Tensor dy = dense(gradient.values, shape);
  const at::Tensor& mask = gradient.relu_mask;
  at::Tensor kept;
  if (keep && mask.defined()) kept = empty_result(dy);
  at::Tensor dx = empty_result(x);
  with_type(shape.compute_type, [&](auto type) {
    using T = decltype(type);
    const GradientData<T> grad{dy.const_data_ptr<T>(), data_or_null<uint8_t>(mask),
                               kept.defined() ? kept.mutable_data_ptr<T>() : nullptr};
    run(grad, x.const_data_ptr<T>(), dx.mutable_data_ptr<T>());
  });
  if (keep) gradient = {kept.defined() ? kept : dy, at::Tensor()};
  return dx.to(input.scalar_type());
}

at::Tensor backward_elementwise(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& moments,
                                const at::Tensor& invstd, const at::Tensor& sums, bool keep) {
  const Shape shape(input);
  BackwardTable table(weight, moments, invstd);
  const double* const sum_dy = sums.const_data_ptr<double>();
  const double* const sum_dy_xmu = sum_dy + shape.c;
  const auto run = [&]<class T>(GradientData<T> grad, const T* x, T* dx) {
    for (int64_t c = 0; c < shape.c; ++c) table.set<T>(c, sum_dy[c], sum_dy_xmu[c]);
    const BackwardCoefficients k = table.get();
    if (shape.rows) {
      for_rows_reversed(
          shape, [&](const Rows& part) { loops<T>().elementwise_rows(grad, x, dx, part, k); });
    } else {
      for_planes(shape,
                 [&](const Planes& part) { loops<T>().elementwise_planes(grad, x, dx, part, k); });
    }
  };
  return make_input_gradient(gradient, input, shape, keep, run);
}

ParameterGradients fused_local_backward(OutputGradient& gradient, const at::Tensor& input,
                                        const at::Tensor& weight, const at::Tensor& moments,
                                        const at::Tensor& invstd, bool keep,
                                        std::optional<at::ScalarType> parameter_type,
                                        at::Tensor& grad_input) {
  const Shape shape(input);
  if (shape.rows) {
    const at::Tensor sums = sum_gradient(gradient, input, moments);
    grad_input = backward_elementwise(gradient, input, weight, moments, invstd, sums, keep);
    return parameter_gradients(sums, invstd, parameter_type);
  }
  BackwardTable table(weight, moments, invstd);
  const at::Tensor sums = doubles({2 * shape.c});
  double* const sum_dy = sums.mutable_data_ptr<double>();
  double* const sum_dy_xmu = sum_dy + shape.c;
  const double* center = moments.const_data_ptr<double>();
  const auto run = [&]<class T>(GradientData<T> grad, const T* x, T* dx) {
    for_channels(shape, [&](const Planes& part, int64_t c) {
      loops<T>().reduce_planes(grad, x, part, center, sum_dy, sum_dy_xmu);
      table.set<T>(c, sum_dy[c], sum_dy_xmu[c]);
      loops<T>().elementwise_planes(grad, x, dx, part, table.get());
    });
  };
  grad_input = make_input_gradient(gradient, input, shape, keep, run);
  return parameter_gradients(sums, invstd, parameter_type);
}

constexpr BatchNormKernels kKernels{.moments = moments,
                                    .merge = merge,
                                    .forward = forward,
                                    .backward_reduce = backward_reduce,
                                    .backward_elementwise = backward_elementwise,
                                    .fused_local_forward = fused_local_forward,
                                    .fused_local_backward = fused_local_backward};

}  // namespace
}  // namespace cpu

at::Tensor total_count(const at::Tensor& moments, int64_t channels) {
  return moments.narrow(0, 2 * channels, moments.size(0) - 2 * channels).sum();
}

at::Tensor apply_relu_mask(const OutputGradient& gradient, const at::Tensor& input) {
  const at::Tensor zero = at::zeros({}, gradient.values.options());
  if (gradient.relu_mask.scalar_type() == at::kBool) {
    return at::where(gradient.relu_mask, gradient.values, zero);
  }
  const cpu::Shape shape(input);
  const cpu::Runs runs(shape);
  const at::Tensor bits = at::arange(8, gradient.relu_mask.options());
  const at::Tensor passes = gradient.relu_mask.unsqueeze(-1)
                                .bitwise_right_shift(bits)
                                .bitwise_and(1)
                                .to(at::kBool)
                                .view({runs.count, 8 * gradient.relu_mask.size(1)})
                                .narrow(1, 0, runs.values);
  std::vector<int64_t> sizes = input.sizes().vec();
  if (shape.rows) std::rotate(sizes.begin() + 1, sizes.begin() + 2, sizes.end());
  at::Tensor ordered = passes.reshape(sizes);
  if (shape.rows) ordered = ordered.movedim(-1, 1);
  return at::where(ordered, gradient.values, zero);
}

const BatchNormKernels& batch_norm_kernels(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return cpu::kKernels;
  if (device == c10::DeviceType::CUDA) return cuda::kKernels;
  throw base::UserError(fmt::format("SyncBatchNorm has no kernels for device type {}",
                                    c10::DeviceTypeName(device, /*lower_case=*/true)));
}

}  // namespace syncbn::dist::detail
