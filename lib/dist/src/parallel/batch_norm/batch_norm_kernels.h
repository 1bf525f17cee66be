#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

/// Statistics of all ranks' values, per channel.
struct MergedMoments {
  at::Tensor mean;   ///< [C] float64
  at::Tensor m2;     ///< [C] float64: sum of squared deviations from the mean
  at::Tensor count;  ///< scalar float64: values per channel over all ranks
};

/// What a layer keeps for evaluation; each tensor may be undefined.
struct RunningStatistics {
  at::Tensor mean, var;            ///< [C], of any floating-point type
  at::Tensor num_batches_tracked;  ///< scalar: int64, or the type that Module::to(dtype) gave it
  std::optional<double> momentum;  ///< nullopt: 1 / num_batches_tracked
};

/// [2C+1], as BatchNormKernels::moments() returns them.
at::Tensor as_row(const MergedMoments& moments);

struct ParameterGradients {
  at::Tensor weight, bias;  ///< [C]
};

/// The operations fused with the normalisation, in this order.
struct Epilogue {
  at::Tensor residual;  ///< added; of the input's sizes, may be undefined
  bool relu = false;
};

/// The ReLU mask tells where the ReLU lets gradients pass: on the CPU one bit per value, on GPUs
/// the output itself. Undefined without ReLU.
struct Output {
  at::Tensor values, relu_mask;
};

/// The gradient of a layer's output. A defined mask has not been applied yet.
struct OutputGradient {
  at::Tensor values, relu_mask;
};

/// The arithmetic of batch normalisation on one kind of device: everything but the exchange.
/// Inputs are [N, C, ...] of 2 to 5 dimensions and any strides; results have the input's dtype and
/// memory format. Statistics are float64 tensors on the input's device, whatever its dtype.
/// None of the functions waits for the device.
struct BatchNormKernels {
  /// [2C+1] float64 of this rank's values: C means, C times m2, and the values per channel.
  at::Tensor (*moments)(const at::Tensor& input);

  /// Merges W ranks' statistics by Chan, Golub and LeVeque's formula ("Updating formulae and a
  /// pairwise algorithm for computing sample variances", 1979), in the order of ranks.
  /// @param gathered [W, 2C+1 or more] float64; each row begins with moments, whose count may be 0.
  MergedMoments (*merge)(const at::Tensor& gathered, int64_t channels);

  /// 1 / sqrt(variance + eps), [C] float64; 1 / sqrt(eps) if the count is 0.
  at::Tensor (*inverse_deviation)(const MergedMoments& moments, double eps);

  /// Increments num_batches_tracked; then running = (1 - momentum) * running + momentum * new, with
  /// the unbiased variance.
  void (*update_running)(const RunningStatistics& running, const MergedMoments& moments);

  /// (input - mean) * invstd * weight + bias, and the epilogue; weight and bias may be undefined.
  Output (*transform)(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      const at::Tensor& mean, const at::Tensor& invstd, const Epilogue& epilogue);

  /// Applies the mask, with operations that autograd can differentiate.
  at::Tensor (*apply_relu_mask)(const OutputGradient& gradient, const at::Tensor& input);

  /// [2C] float64: for each channel the sum of the masked gradient g, then for each channel the sum
  /// of g * (input - mean). May replace `gradient` by the masked one.
  at::Tensor (*backward_reduce)(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& mean, const at::Tensor& invstd);

  /// (g - mean_dy - (input - mean) * invstd^2 * mean_dy_xmu) * invstd * weight, the gradient in
  /// Ioffe and Szegedy (2015), where mean_dy and mean_dy_xmu are sums / count.
  /// @param keep The caller needs g as well: replaces `gradient` by the masked one.
  at::Tensor (*backward_elementwise)(OutputGradient& gradient, const at::Tensor& input,
                                     const at::Tensor& weight, const at::Tensor& mean,
                                     const at::Tensor& invstd, const at::Tensor& sums,
                                     const at::Tensor& count, bool keep);

  /// @param sums of this rank. @param type of the parameters; the gradients have it or a wider one.
  ParameterGradients (*parameter_gradients)(const at::Tensor& sums, const at::Tensor& invstd,
                                            at::ScalarType type);

  // Two steps in one for a single rank, which exchanges nothing between them: each channel is read
  // from memory once. Null if fusing saves nothing on this device.

  /// moments and transform.
  MergedMoments (*fused_local_forward)(const at::Tensor& input, const at::Tensor& weight,
                                       const at::Tensor& bias, double eps, const Epilogue& epilogue,
                                       Output& output) = nullptr;

  /// backward_reduce and backward_elementwise.
  at::Tensor (*fused_local_backward)(OutputGradient& gradient, const at::Tensor& input,
                                     const at::Tensor& weight, const at::Tensor& mean,
                                     const at::Tensor& invstd, const at::Tensor& count, bool keep,
                                     at::Tensor& grad_input) = nullptr;
};

/// @throws base::UserError for a device without kernels.
const BatchNormKernels& batch_norm_kernels(c10::DeviceType device);

}  // namespace syncbn::dist::detail
