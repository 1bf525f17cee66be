// Batch norm on CUDA: the operators of PyTorch's SyncBatchNorm (torch/nn/modules/_functions.py),
// with the same arguments, for the statistics and the normalisation; other operators of ATen for
// the rest. Links no CUDA.

#include <utility>

#include <ATen/AccumulateType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail {
namespace cuda {
namespace {

/// The operators take contiguous and channels-last tensors.
at::Tensor dense(const at::Tensor& tensor) {
  const bool is_channels_last = tensor.is_contiguous(at::MemoryFormat::ChannelsLast) ||
                                tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d);
  return is_channels_last ? tensor : tensor.contiguous();
}

at::Tensor contiguous(const at::Tensor& parameter) {
  return parameter.defined() ? parameter.contiguous() : parameter;
}

/// Views of moments.
struct Statistics {
  Statistics(const at::Tensor& moments, int64_t channels)
      : mean(moments.narrow(0, 0, channels)),
        invstd(moments.narrow(0, channels, channels)),
        counts(moments.narrow(0, 2 * channels, moments.size(0) - 2 * channels)) {}
  at::Tensor mean, invstd, counts;
};

at::Tensor moments(const at::Tensor& input, double eps) {
  const at::Tensor x = dense(input);
  const int64_t channels = x.size(1);
  if (x.numel() == 0) {
    // Python sends them in the input's type, which other ranks of float16 do not expect.
    const at::ScalarType type = at::toAccumulateType(x.scalar_type(), /*is_cuda=*/true);
    return at::zeros({2 * channels + 1}, x.options().dtype(type));
  }
  const auto [mean, invstd] = at::batch_norm_stats(x, eps);
  return at::cat({mean, invstd, at::full({1}, x.numel() / channels, mean.options())});
}

at::Tensor merge(const at::Tensor& rows, int64_t channels, double eps) {
  const at::Tensor wide = rows.to(at::kDouble);
  const at::Tensor counts = wide.narrow(1, 2 * channels, 1);
  const at::Tensor total = counts.sum(0);
  const auto average = [&](const at::Tensor& values) {
    return at::where(counts > 0, values * counts, 0).sum(0) / total.clamp_min(1);
  };
  const at::Tensor means = wide.narrow(1, 0, channels);
  const at::Tensor mean = average(means);
  const at::Tensor variances = wide.narrow(1, channels, channels).pow(-2) - eps;
  const at::Tensor variance = average(variances + (means - mean).square());
  return at::cat({mean, (variance + eps).rsqrt(), total}).to(rows.scalar_type());
}

/// The statistics over all ranks, as moments; updates the running statistics.
/// @param rows [W, 2C + 1]
at::Tensor gather(const at::Tensor& x, const at::Tensor& rows, const ForwardOptions& options) {
  const int64_t channels = x.size(1);
  // This waits for the device, as Python's does. A single row has this input's values; if there are
  // none, it may have those of other replicas.
  const at::Tensor present =
      rows.size(0) == 1 && x.numel() != 0
          ? rows
          : rows.index_select(0, (rows.select(1, 2 * channels) >= 1).nonzero().squeeze(1));
  if (present.size(0) == 0) return at::zeros({2 * channels + 1}, rows.options());
  const at::Tensor counts = present.select(1, 2 * channels);
  RunningStatistics running = options.running;
  // One value per channel has no variance.
  const bool has_variance = x.numel() / channels > 1 || counts.sum().item<double>() > 1;
  if (!has_variance) running = {};
  double momentum = running.momentum.value_or(0);
  if (running.num_batches_tracked.defined()) {
    running.num_batches_tracked.add_(1);
    if (!running.momentum) momentum = 1 / running.num_batches_tracked.item<double>();
  }
  // The operator wants counts of the running statistics' type, in which float16 would overflow.
  const auto of_rows = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(rows.scalar_type()) : tensor;
  };
  const at::Tensor running_mean = of_rows(running.mean);
  const at::Tensor running_var = of_rows(running.var);
  // Without running statistics, the first argument determines the type.
  const bool determines = !running_mean.defined() && x.scalar_type() != rows.scalar_type();
  const auto [mean, invstd] = at::batch_norm_gather_stats_with_counts(
      determines ? rows : x, present.narrow(1, 0, channels), present.narrow(1, channels, channels),
      running_mean, running_var, momentum, options.eps, counts);
  for (const auto& [buffer, updated] :
       {std::pair(&running.mean, &running_mean), std::pair(&running.var, &running_var)}) {
    if (!buffer->defined()) continue;
    if (!buffer->is_same(*updated)) {
      buffer->copy_(*updated);
    } else {
      buffer->unsafeGetTensorImpl()->bump_version();
    }
  }
  return at::cat({mean, invstd, counts});
}

Normalized forward(const at::Tensor& input, const at::Tensor& rows, const ForwardOptions& options) {
  const at::Tensor x = dense(input);
  const int64_t channels = x.size(1);
  const RunningStatistics& running = options.running;
  const bool updates = running.mean.defined() || running.num_batches_tracked.defined();
  // A single row may be that of all ranks, from an earlier forward.
  const bool is_merged = rows.size(0) == 1 && !updates;
  Normalized result{.moments = is_merged ? rows[0] : gather(x, rows, options)};
  const Statistics all(result.moments, channels);
  result.invstd = all.invstd;
  at::Tensor& values = result.output.values;
  values = x.numel() == 0
               ? at::empty_like(x)
               : at::batch_norm_elemt(x, contiguous(options.weight), contiguous(options.bias),
                                      all.mean, all.invstd, options.eps);
  if (options.epilogue.residual.defined()) values.add_(options.epilogue.residual);
  if (options.epilogue.relu) {
    values.relu_();
    result.output.relu_mask = values.le(0).logical_not_();  // true for NaN
  }
  return result;
}

GradientSums backward_reduce(const OutputGradient& gradient, const at::Tensor& input,
                             const at::Tensor& weight, const at::Tensor& moments,
                             const at::Tensor& invstd, const at::Tensor& before,
                             std::optional<at::ScalarType> parameter_type) {
  const at::Tensor x = dense(input);
  const int64_t channels = x.size(1);
  GradientSums result;
  if (x.numel() == 0) {
    result.sums = at::zeros({2 * channels}, moments.options());
  } else {
    const bool wants = parameter_type && weight.defined();
    const auto [sum_dy, sum_dy_xmu, grad_weight, grad_bias] = at::batch_norm_backward_reduce(
        dense(gradient.values), x, moments.narrow(0, 0, channels), invstd, contiguous(weight),
        /*input_g=*/true, wants, wants);
    result.sums = at::cat({sum_dy, sum_dy_xmu});
    if (wants) result.parameters = {grad_weight, grad_bias};
  }
  if (before.defined()) result.sums.add_(before);
  const bool is_partial = before.defined() || !result.parameters.weight.defined();
  if (parameter_type && is_partial) {
    result.parameters = {(result.sums.narrow(0, channels, channels) * invstd).to(*parameter_type),
                         result.sums.narrow(0, 0, channels).to(*parameter_type, false, true)};
  }
  return result;
}

at::Tensor backward_elementwise(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& moments,
                                const at::Tensor& invstd, const at::Tensor& sums, bool /*keep*/) {
  const at::Tensor x = dense(input);
  if (x.numel() == 0) return at::empty_like(x);
  const int64_t channels = x.size(1);
  const Statistics all(moments, channels);
  at::Tensor scale = contiguous(weight);
  if (scale.defined()) scale = scale.to(invstd.scalar_type());
  return at::batch_norm_backward_elemt(
      dense(gradient.values), x, all.mean, invstd, scale, sums.narrow(0, 0, channels),
      sums.narrow(0, channels, channels), all.counts.to(at::kInt).unsqueeze(1));
}

}  // namespace

const BatchNormKernels kKernels{.moments = moments,
                                .merge = merge,
                                .forward = forward,
                                .backward_reduce = backward_reduce,
                                .backward_elementwise = backward_elementwise};

}  // namespace cuda

}  // namespace syncbn::dist::detail
