#include "step/gradients.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

namespace syncbn::train {
namespace {

constexpr double kNormEps = 1e-6;   // of clip_grad_norm_
constexpr double kUnitEps = 1e-3;   // of adaptive_clip_grad
constexpr double kZeroNorm = 1e-6;  // of adaptive_clip_grad: lower bound on a divisor

/// The norm of each unit, in a shape that broadcasts over `tensor`.
at::Tensor unit_norms(const at::Tensor& tensor) {
  if (tensor.dim() < 2) return tensor.norm();
  std::vector<int64_t> dims;
  for (int64_t dim = 1; dim < tensor.dim(); ++dim) dims.push_back(dim);
  return tensor.norm(2, dims, /*keepdim=*/true);
}

}  // namespace

Tensors gradients_of(const Tensors& parameters) {
  Tensors gradients;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

at::Tensor clip_norm(const Tensors& gradients, double max_norm) {
  const at::NoGradGuard no_grad;
  const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, 2)), 2);
  // Python computes number / tensor like this.
  const at::Tensor factor = ((norm + kNormEps).reciprocal() * max_norm).clamp_max(1);
  at::_foreach_mul_(gradients, factor);
  return norm;
}

void clip_value(const Tensors& gradients, double limit) {
  const at::NoGradGuard no_grad;
  at::_foreach_clamp_min_(gradients, -limit);
  at::_foreach_clamp_max_(gradients, limit);
}

void clip_adaptive(const Tensors& parameters, double factor) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    const at::Tensor limit = unit_norms(parameter).clamp_min(kUnitEps) * factor;
    const at::Tensor norm = unit_norms(gradient);
    gradient.mul_(at::where(norm < limit, at::ones_like(norm), limit / norm.clamp_min(kZeroNorm)));
  }
}

GradScaler::GradScaler(const ScalerConfig& options, at::Device device)
    : options_(options),
      scale_(at::full({}, options.init_scale, at::TensorOptions(at::kFloat).device(device))),
      growth_tracker_(at::zeros({}, at::TensorOptions(at::kInt).device(device))) {}

void GradScaler::unscale(const Tensors& gradients, at::Tensor& found_inf) const {
  const at::NoGradGuard no_grad;
  // In float64, as in Python, so that the quotient is exact for every power of two.
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse);
}

void GradScaler::update(const at::Tensor& found_inf) {
  at::_amp_update_scale_(scale_, growth_tracker_, found_inf, options_.growth_factor,
                         options_.backoff_factor, options_.growth_interval);
}

std::map<std::string, at::Tensor> GradScaler::state() const {
  return {{"scale", scale_}, {"growth_tracker", growth_tracker_}};
}

void GradScaler::load(const std::map<std::string, at::Tensor>& state) {
  scale_.copy_(state.at("scale"));
  growth_tracker_.copy_(state.at("growth_tracker"));
}

}  // namespace syncbn::train
