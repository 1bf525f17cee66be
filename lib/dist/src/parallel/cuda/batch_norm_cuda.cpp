// Batch norm on CUDA through ATen's operators, for libsyncbn_dist_cuda.so.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail {

/// A float64 count on the GPU as the int32 tensor of one element that ATen's
/// batch_norm_backward_elemt expects, without a copy to the host. Counts above 2^31 - 1 saturate.
at::Tensor count_to_int(const at::Tensor& count);

namespace {

/// ATen's kernels take float16 and bfloat16 inputs only with statistics in float32.
at::ScalarType statistics_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor as_statistics(const at::Tensor& tensor, const at::Tensor& input) {
  return tensor.defined() ? tensor.detach().to(statistics_type(input)) : tensor;
}

at::Tensor moments(const at::Tensor& input) {
  const auto options = input.options().dtype(at::kDouble);
  if (input.numel() == 0) return at::zeros({2 * input.size(1) + 1}, options);
  // The local mean and biased variance, in float32 or better.
  auto [mean, variance] =
      at::batch_norm_update_stats(input.detach(), /*running_mean=*/{}, /*running_var=*/{}, 0.0);
  const auto values = static_cast<double>(input.numel() / input.size(1));
  return at::cat(
      {mean.to(at::kDouble), variance.to(at::kDouble) * values, at::full({1}, values, options)});
}

MergedMoments merge(const at::Tensor& gathered, int64_t channels) {
  const at::Tensor means = gathered.narrow(1, 0, channels);
  const at::Tensor m2s = gathered.narrow(1, channels, channels);
  const at::Tensor counts = gathered.narrow(1, 2 * channels, 1);
  const at::Tensor total = counts.sum();
  // A batch that is empty on every rank must not give NaN.
  const at::Tensor mean = (means * (counts / total.clamp_min(1.0))).sum(0);
  const at::Tensor delta = means - mean;
  return {mean, (m2s + counts * delta * delta).sum(0), total};
}

at::Tensor inverse_deviation(const MergedMoments& moments, double eps) {
  return moments.m2.div(moments.count.clamp_min(1.0)).add_(eps).rsqrt_();
}

void update_running(const RunningStatistics& running, const MergedMoments& moments) {
  at::Tensor share;  // of this batch in the cumulative average
  if (running.num_batches_tracked.defined()) {
    running.num_batches_tracked.add_(1);
    if (!running.momentum) share = at::reciprocal(running.num_batches_tracked.to(at::kDouble));
  }
  const auto blend = [&](const at::Tensor& to, const at::Tensor& value) {
    if (!to.defined()) return;
    const at::Tensor batch = value.to(to.scalar_type());
    if (running.momentum) {
      to.lerp_(batch, *running.momentum);
    } else if (share.defined()) {
      to.lerp_(batch, share.to(to.scalar_type()));
    }
  };
  blend(running.mean, moments.mean);
  blend(running.var, moments.m2 / (moments.count - 1));
}

// The ReLU mask is the output itself.

Output transform(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                 const at::Tensor& mean, const at::Tensor& invstd, const Epilogue& epilogue) {
  if (input.numel() == 0) {
    const at::Tensor empty = at::empty_like(input);
    return {empty, epilogue.relu ? empty : at::Tensor()};
  }
  at::Tensor output =
      at::batch_norm_elemt(input.detach(), as_statistics(weight, input), as_statistics(bias, input),
                           as_statistics(mean, input), as_statistics(invstd, input), /*eps=*/0.0);
  if (epilogue.residual.defined()) output.add_(epilogue.residual);
  if (!epilogue.relu) return {output, at::Tensor()};
  output.relu_();
  return {output, output};
}

at::Tensor apply_relu_mask(const OutputGradient& gradient, const at::Tensor& /*input*/) {
  return at::threshold_backward(gradient.values, gradient.relu_mask.detach(), 0);
}

at::Tensor backward_reduce(OutputGradient& gradient, const at::Tensor& input,
                           const at::Tensor& mean, const at::Tensor& invstd) {
  if (gradient.relu_mask.defined()) gradient = {apply_relu_mask(gradient, input), at::Tensor()};
  if (input.numel() == 0) {
    return at::zeros({2 * input.size(1)}, input.options().dtype(at::kDouble));
  }
  auto [sum_dy, sum_dy_xmu, grad_weight, grad_bias] = at::batch_norm_backward_reduce(
      gradient.values.contiguous(input.suggest_memory_format()), input, as_statistics(mean, input),
      as_statistics(invstd, input), /*weight=*/{}, /*input_g=*/true, /*weight_g=*/false,
      /*bias_g=*/false);
  return at::cat({sum_dy, sum_dy_xmu}).to(at::kDouble);
}

at::Tensor backward_elementwise(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& mean,
                                const at::Tensor& invstd, const at::Tensor& sums,
                                const at::Tensor& count, bool /*keep*/) {
  if (input.numel() == 0) return at::empty_like(input);
  return at::batch_norm_backward_elemt(
      gradient.values.contiguous(input.suggest_memory_format()), input, as_statistics(mean, input),
      as_statistics(invstd, input), as_statistics(weight, input),
      as_statistics(sums.narrow(0, 0, input.size(1)), input),
      as_statistics(sums.narrow(0, input.size(1), input.size(1)), input), count_to_int(count));
}

ParameterGradients parameter_gradients(const at::Tensor& sums, const at::Tensor& invstd,
                                       at::ScalarType type) {
  const auto halves = sums.chunk(2);
  return {(halves[1] * invstd).to(type), halves[0].to(type)};
}

constexpr BatchNormKernels kCudaKernels = {
    moments,         merge,           inverse_deviation,    update_running,      transform,
    apply_relu_mask, backward_reduce, backward_elementwise, parameter_gradients,
};

}  // namespace
}  // namespace syncbn::dist::detail

extern "C" __attribute__((visibility("default"))) const void* syncbn_cuda_batch_norm() {
  return &syncbn::dist::detail::kCudaKernels;
}
