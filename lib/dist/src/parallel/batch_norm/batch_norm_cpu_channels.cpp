#include <algorithm>
#include <cmath>

#include <ATen/ops/empty.h>

#include "batch_norm/batch_norm_cpu_kernels.h"
#include "batch_norm/batch_norm_cpu_tables.h"
#include "batch_norm/batch_norm_cpu_walk.h"

// What is worked out by channel. A training step does this for every layer, with its caches full of
// other things, and each operator of ATen's would cost more than the arithmetic: so there are none
// where statistics and counter have their usual types.

namespace syncbn::dist::detail::cpu {
namespace {

/// Changes a tensor [C] in place: from the value of channel c to change(value, c), in double.
template <class Change>
void change_channels(const at::Tensor& tensor, Change change) {
  if (!tensor.defined()) return;
  const bool directly = tensor.is_cpu() && tensor.is_contiguous() &&
                        (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble);
  // For autograd, as an operator would; it may refuse.
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

/// @return how many batches there were by now.
double count_up(const at::Tensor& counter) {
  // Module::to(dtype) makes it a floating-point number.
  if (!counter.is_cpu() || counter.scalar_type() != at::kLong) {
    counter.add_(1);
    return counter.item<double>();
  }
  counter.unsafeGetTensorImpl()->bump_version();
  return static_cast<double>(++*counter.mutable_data_ptr<int64_t>());
}

}  // namespace

double merge_rows(const double* rows, int64_t count_of_rows, int64_t stride, int64_t channels,
                  double* mean, double* m2) {
  double total = 0;
  for (int64_t i = 0; i < count_of_rows; ++i) total += rows[i * stride + 2 * channels];
  std::fill_n(mean, channels, 0.0);
  std::fill_n(m2, channels, 0.0);
  if (total == 0) return total;
  // Rows without values hold arbitrary statistics: a factor of 0 would not hide a NaN.
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

MergedMoments merge(const at::Tensor& gathered, int64_t channels) {
  MergedMoments merged{doubles({channels}), doubles({channels}), doubles({})};
  *merged.count.mutable_data_ptr<double>() =
      merge_rows(gathered.const_data_ptr<double>(), gathered.size(0), gathered.stride(0), channels,
                 merged.mean.mutable_data_ptr<double>(), merged.m2.mutable_data_ptr<double>());
  return merged;
}

at::Tensor inverse_deviation(const MergedMoments& moments, double eps) {
  at::Tensor result = doubles(moments.m2.sizes());
  const double count = std::max(*moments.count.const_data_ptr<double>(), 1.0);
  const double* const m2 = moments.m2.const_data_ptr<double>();
  double* const values = result.mutable_data_ptr<double>();
  for (int64_t c = 0; c < result.numel(); ++c) values[c] = 1 / std::sqrt(m2[c] / count + eps);
  return result;
}

void update_running(const RunningStatistics& running, const MergedMoments& moments) {
  const at::Tensor& counter = running.num_batches_tracked;
  double momentum = running.momentum.value_or(0);
  if (counter.defined()) {
    const double batches = count_up(counter);
    if (!running.momentum) momentum = 1 / batches;
  }
  const double* const mean = moments.mean.const_data_ptr<double>();
  const double* const m2 = moments.m2.const_data_ptr<double>();
  const double count = *moments.count.const_data_ptr<double>();
  const auto blend = [momentum](double before, double batch) {
    return (1 - momentum) * before + momentum * batch;
  };
  change_channels(running.mean, [&](double before, int64_t c) { return blend(before, mean[c]); });
  change_channels(running.var,
                  [&](double before, int64_t c) { return blend(before, m2[c] / (count - 1)); });
}

ParameterGradients parameter_gradients(const at::Tensor& sums, const at::Tensor& invstd,
                                       at::ScalarType type) {
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

}  // namespace syncbn::dist::detail::cpu
