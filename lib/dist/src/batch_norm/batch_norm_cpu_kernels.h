#pragma once

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail::cpu {

// The members of BatchNormKernels, on the CPU.

Moments moments(const at::Tensor& input);
MergedMoments merge(const at::Tensor& gathered);
Output transform(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                 const at::Tensor& mean, const at::Tensor& invstd, const Epilogue& epilogue);
at::Tensor pass_gate(const OutputGradient& gradient, const at::Tensor& input);
BackwardSums backward_reduce(OutputGradient& gradient, const at::Tensor& input,
                             const at::Tensor& mean, const at::Tensor& invstd);
at::Tensor backward_elementwise(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& mean,
                                const at::Tensor& invstd, const BackwardSums& sums,
                                const at::Tensor& count, bool keep);
MergedMoments normalize_alone(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& bias, double eps, const Epilogue& epilogue,
                              Output& output);
BackwardSums backward_alone(OutputGradient& gradient, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& mean,
                            const at::Tensor& invstd, const at::Tensor& count, bool keep,
                            at::Tensor& grad_input);

}  // namespace syncbn::dist::detail::cpu
