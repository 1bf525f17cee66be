#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/train/config.h>

namespace syncbn::train {

using Tensors = std::vector<at::Tensor>;

// Gradients are equal on all ranks after DistributedDataParallel's exchange, so the functions below
// give the same result on all ranks without another exchange. None waits for the device.

/// The gradients of the parameters that have one.
Tensors gradients_of(const Tensors& parameters);

/// Scales gradients so that their joint norm is at most `max_norm`, as
/// torch.nn.utils.clip_grad_norm_ does. Returns the norm before scaling, a scalar.
at::Tensor clip_norm(const Tensors& gradients, double max_norm);

/// Limits each element to [-limit, limit], as torch.nn.utils.clip_grad_value_ does.
void clip_value(const Tensors& gradients, double limit);

/// Adaptive gradient clipping (Brock et al., arXiv:2102.06171), as timm's adaptive_clip_grad:
/// limits the norm of each unit's gradient to `factor` times the norm of its weights, which counts
/// as at least 1e-3. A unit is a row of a matrix or filter, or a whole vector.
void clip_adaptive(const Tensors& parameters, double factor);

/// Scales the loss so that small gradients do not vanish in float16, with the scales of
/// torch.amp.GradScaler. Not thread-safe.
class GradScaler {
 public:
  GradScaler(const ScalerConfig& options, at::Device device);

  at::Tensor scale(const at::Tensor& loss) const { return loss * scale_.to(loss.scalar_type()); }

  /// Divides the gradients by the scale, and sets `found_inf` to 1 if one is not finite.
  void unscale(const Tensors& gradients, at::Tensor& found_inf) const;

  /// Lowers the scale if `found_inf` is 1, and raises it after growth_interval steps without
  /// overflow.
  void update(const at::Tensor& found_inf);

  /// The scaler's own tensors, by name.
  std::map<std::string, at::Tensor> state() const;
  void load(const std::map<std::string, at::Tensor>& state);

 private:
  ScalerConfig options_;
  at::Tensor scale_;           ///< float32 scalar
  at::Tensor growth_tracker_;  ///< int32 scalar: steps since the scale changed
};

}  // namespace syncbn::train
