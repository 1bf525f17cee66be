#pragma once

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail::cpu {

// The members of BatchNormKernels, on the CPU.

at::Tensor moments(const at::Tensor& input);
MergedMoments merge(const at::Tensor& gathered, int64_t channels);
at::Tensor inverse_deviation(const MergedMoments& moments, double eps);
void update_running(const RunningStatistics& running, const MergedMoments& moments);
Output transform(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                 const at::Tensor& mean, const at::Tensor& invstd, const Epilogue& epilogue);
at::Tensor pass_gate(const OutputGradient& gradient, const at::Tensor& input);
at::Tensor backward_reduce(OutputGradient& gradient, const at::Tensor& input,
                           const at::Tensor& mean, const at::Tensor& invstd);
at::Tensor backward_elementwise(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& mean,
                                const at::Tensor& invstd, const at::Tensor& sums,
                                const at::Tensor& count, bool keep);
ParameterGradients parameter_gradients(const at::Tensor& sums, const at::Tensor& invstd,
                                       at::ScalarType type);
MergedMoments normalize_alone(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& bias, double eps, const Epilogue& epilogue,
                              Output& output);
at::Tensor backward_alone(OutputGradient& gradient, const at::Tensor& input,
                          const at::Tensor& weight, const at::Tensor& mean,
                          const at::Tensor& invstd, const at::Tensor& count, bool keep,
                          at::Tensor& grad_input);

}  // namespace syncbn::dist::detail::cpu
