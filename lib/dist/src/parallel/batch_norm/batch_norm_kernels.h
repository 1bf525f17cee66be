#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

// Moments are the statistics of a channel's values, for all channels in one row of 2C + 1 float64:
// C means, C times m2 (the sum of squared deviations from the mean), and the values per channel.
// On CUDA they are those of PyTorch's SyncBatchNorm: C means, C times 1 / sqrt(variance + eps), and
// the values per channel, in float32, or in float64 for an input of float64. If they are of all
// ranks, the values per channel of each rank with input follow.

/// A layer's statistics for evaluation; each tensor may be undefined.
struct RunningStatistics {
  at::Tensor mean, var;            ///< [C], of any floating-point type
  at::Tensor num_batches_tracked;  ///< scalar: int64, or the type that Module::to(dtype) gave it
  std::optional<double> momentum;  ///< nullopt: 1 / num_batches_tracked
};

/// The operations fused with the normalisation, in this order.
struct Epilogue {
  at::Tensor residual;  ///< added; of the input's sizes, may be undefined
  bool relu = false;
};

/// Operands of a layer's forward besides its input and the statistics.
struct ForwardOptions {
  at::Tensor weight, bias;  ///< [C], may be undefined
  double eps;
  Epilogue epilogue;
  /// num_batches_tracked is incremented; then running = (1 - momentum) * running + momentum * new,
  /// with the unbiased variance. Nothing changes with fewer than two values per channel.
  RunningStatistics running = {};
};

/// The ReLU mask marks where the ReLU lets gradients pass: one bit per value, from the lowest. Each
/// row of all channels (channels-last, or 2-D), or plane of one, begins with a new byte: [rows or
/// planes, bytes] uint8. On CUDA it is a bool per value. Undefined without ReLU.
struct Output {
  at::Tensor values = {}, relu_mask = {};
};

struct Normalized {
  at::Tensor moments = {};  ///< merged
  /// [C]: 1 / sqrt(variance + eps)
  at::Tensor invstd = {};
  Output output = {};
};

/// The gradient of a layer's output. A defined mask has not been applied yet.
struct OutputGradient {
  at::Tensor values, relu_mask;
};

/// Applies the mask, with operations that autograd can differentiate.
at::Tensor apply_relu_mask(const OutputGradient& gradient, const at::Tensor& input);

struct ParameterGradients {
  at::Tensor weight = {}, bias = {};  ///< [C]
};

struct GradientSums {
  /// [2C], of the moments' type: for each channel the sum of the masked gradient g, then for each
  /// channel the sum of g * (input - mean).
  at::Tensor sums = {};
  ParameterGradients parameters = {};  ///< written with the sums; undefined without parameter_type
};

/// The arithmetic of batch normalisation on one kind of device: everything but the exchange.
/// Inputs are [N, C, ...] of 2 to 5 dimensions and any strides; results have the input's dtype and
/// memory format. Statistics are tensors on the input's device.
struct BatchNormKernels {
  /// Moments of this rank's values.
  at::Tensor (*moments)(const at::Tensor& input, double eps);

  /// Merges W ranks' moments by Chan, Golub and LeVeque's formula ("Updating formulae and a
  /// pairwise algorithm for computing sample variances", 1979), in the order of ranks. On CPUs,
  /// returns a single row bit for bit.
  /// @param rows [W, 2C+1 or more]; each begins with moments, whose count may be 0.
  at::Tensor (*merge)(const at::Tensor& rows, int64_t channels, double eps);

  /// Merges the rows, computes (input - mean) * invstd * weight + bias, and applies the epilogue.
  Normalized (*forward)(const at::Tensor& input, const at::Tensor& rows,
                        const ForwardOptions& options);

  /// @param moments, invstd as forward() returned them
  /// @param before [2C], added to the sums; may be undefined
  /// @param gradient without a mask on CUDA
  /// @param parameter_type of the parameters, whose gradients have it or a wider type; nullopt: do
  ///   not compute these gradients
  GradientSums (*backward_reduce)(const OutputGradient& gradient, const at::Tensor& input,
                                  const at::Tensor& weight, const at::Tensor& moments,
                                  const at::Tensor& invstd, const at::Tensor& before,
                                  std::optional<at::ScalarType> parameter_type);

  /// (g - mean_dy - (input - mean) * invstd^2 * mean_dy_xmu) * invstd * weight, the gradient in
  /// Ioffe and Szegedy (2015), where mean_dy and mean_dy_xmu are sums / count.
  /// @param sums [2C] over ranks
  /// @param keep the caller needs g as well: replace `gradient` by the masked one
  at::Tensor (*backward_elementwise)(OutputGradient& gradient, const at::Tensor& input,
                                     const at::Tensor& weight, const at::Tensor& moments,
                                     const at::Tensor& invstd, const at::Tensor& sums, bool keep);

  // Two steps fused for a single rank, which exchanges nothing between them: they read each channel
  // from memory once. Null if fusing saves nothing on this device.

  /// moments and forward.
  Normalized (*fused_local_forward)(const at::Tensor& input,
                                    const ForwardOptions& options) = nullptr;

  /// backward_reduce and backward_elementwise.
  ParameterGradients (*fused_local_backward)(OutputGradient& gradient, const at::Tensor& input,
                                             const at::Tensor& weight, const at::Tensor& moments,
                                             const at::Tensor& invstd, bool keep,
                                             std::optional<at::ScalarType> parameter_type,
                                             at::Tensor& grad_input) = nullptr;
};

namespace cuda {
extern const BatchNormKernels kKernels;
}

/// @throws base::UserError for a device without kernels.
const BatchNormKernels& batch_norm_kernels(c10::DeviceType device);

/// The values per channel of all ranks: a scalar on the moments' device.
at::Tensor total_count(const at::Tensor& moments, int64_t channels);

}  // namespace syncbn::dist::detail
