#pragma once

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail::cpu {

// The members of BatchNormKernels, on the CPU.

Moments moments(const at::Tensor& input);
MergedMoments merge(const at::Tensor& gathered);
at::Tensor transform(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const at::Tensor& mean, const at::Tensor& invstd, const Epilogue& epilogue);
BackwardSums backward_reduce(at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean,
                             const at::Tensor& invstd, const at::Tensor& relu_output);
at::Tensor backward_elementwise(const at::Tensor& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& mean,
                                const at::Tensor& invstd, const BackwardSums& sums,
                                const at::Tensor& count, bool overwrite);
MergedMoments normalize_alone(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& bias, double eps, const Epilogue& epilogue,
                              at::Tensor& output);
BackwardSums backward_alone(at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& mean, const at::Tensor& invstd,
                            const at::Tensor& count, const at::Tensor& relu_output,
                            bool keep_gradient, at::Tensor& grad_input);

}  // namespace syncbn::dist::detail::cpu
