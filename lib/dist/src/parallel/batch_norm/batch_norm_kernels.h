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
  at::Tensor num_batches_tracked;  ///< scalar: int64, or what Module::to(dtype) made of it
  std::optional<double> momentum;  ///< nullopt: 1 / num_batches_tracked
};

struct ParameterGradients {
  at::Tensor weight, bias;  ///< [C]
};

/// What follows normalising in a layer, in this order.
struct Epilogue {
  at::Tensor residual;  ///< added; of the input's sizes, may be undefined
  bool relu = false;
};

/// What a layer gives, and what it keeps for its backward of the ReLU: the gate, which says where
/// that lets gradients pass. In a form of the kernels' own; undefined without ReLU.
struct Output {
  at::Tensor values, gate;
};

/// The gradient of a layer's output, and the gate that it has still to go through, if defined.
struct OutputGradient {
  at::Tensor values, gate;
};

/// The arithmetic of batch normalisation on one kind of device: everything but the exchange.
/// Inputs are [N, C, ...] of 2 to 5 dimensions and any strides; results have the input's dtype and
/// memory format. Statistics are float64 tensors on the input's device, whatever its dtype.
/// None of the functions waits for the device.
struct BatchNormKernels {
  /// Statistics of this rank's values: [2C+1] float64, the mean and m2 of each channel, and the
  /// count of values in one.
  at::Tensor (*moments)(const at::Tensor& input);

  /// Merges W ranks' statistics by Chan, Golub and LeVeque's formula ("Updating formulae and a
  /// pairwise algorithm for computing sample variances", 1979), in the order of ranks.
  /// @param gathered [W, 2C+1 or more] float64, with each rank's moments first in its row; a rank
  ///   may have count 0.
  MergedMoments (*merge)(const at::Tensor& gathered, int64_t channels);

  /// 1 / sqrt(variance + eps), [C] float64; of no values at all 1 / sqrt(eps), not 0 / 0.
  at::Tensor (*inverse_deviation)(const MergedMoments& moments, double eps);

  /// Counts the batch, and running = (1 - momentum) * running + momentum * new, with the unbiased
  /// variance.
  void (*update_running)(const RunningStatistics& running, const MergedMoments& moments);

  /// (input - mean) * invstd * weight + bias, and the epilogue; weight and bias may be undefined.
  Output (*transform)(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      const at::Tensor& mean, const at::Tensor& invstd, const Epilogue& epilogue);

  /// The gradient behind its gate, by operations that autograd knows.
  at::Tensor (*pass_gate)(const OutputGradient& gradient, const at::Tensor& input);

  /// Sums of g, the gradient behind its gate, through which it may take it: [2C] float64, the sum
  /// of g for each channel, then that of g * (input - mean).
  at::Tensor (*backward_reduce)(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& mean, const at::Tensor& invstd);

  /// (gradient - mean_dy - (input - mean) * invstd^2 * mean_dy_xmu) * invstd * weight, the
  /// gradient in Ioffe and Szegedy (2015), where mean_dy and mean_dy_xmu are sums / count.
  /// @param keep The gradient itself is wanted as well: it is taken through its gate.
  at::Tensor (*backward_elementwise)(OutputGradient& gradient, const at::Tensor& input,
                                     const at::Tensor& weight, const at::Tensor& mean,
                                     const at::Tensor& invstd, const at::Tensor& sums,
                                     const at::Tensor& count, bool keep);

  /// Of this rank's sums.
  /// @param type the parameters'; the gradients have that, or a wider one.
  ParameterGradients (*parameter_gradients)(const at::Tensor& sums, const at::Tensor& invstd,
                                            at::ScalarType type);

  // The same for a rank alone, where nothing comes in between, so that each channel is read from
  // memory once. Null where that brings nothing.

  /// moments and transform.
  MergedMoments (*normalize_alone)(const at::Tensor& input, const at::Tensor& weight,
                                   const at::Tensor& bias, double eps, const Epilogue& epilogue,
                                   Output& output);

  /// backward_reduce and backward_elementwise.
  at::Tensor (*backward_alone)(OutputGradient& gradient, const at::Tensor& input,
                               const at::Tensor& weight, const at::Tensor& mean,
                               const at::Tensor& invstd, const at::Tensor& count, bool keep,
                               at::Tensor& grad_input);
};

/// The kernels for a device. @throws base::UserError for a device that has none.
const BatchNormKernels& batch_norm_kernels(c10::DeviceType device);

}  // namespace syncbn::dist::detail
