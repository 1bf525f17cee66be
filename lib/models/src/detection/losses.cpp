#include "losses.h"

#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>

namespace syncbn::models {

at::Tensor sigmoid_focal_loss(const at::Tensor& logits, const at::Tensor& targets) {
  constexpr double kAlpha = 0.25;
  const at::Tensor p = at::sigmoid(logits);
  const at::Tensor wrong = p * (1 - targets) + (1 - p) * targets;
  const at::Tensor alpha = kAlpha * targets + (1 - kAlpha) * (1 - targets);
  return alpha * wrong.square() *
         at::binary_cross_entropy_with_logits(logits, targets, /*weight=*/{}, /*pos_weight=*/{},
                                              at::Reduction::None);
}

at::Tensor giou_loss(const at::Tensor& boxes, const at::Tensor& targets) {
  constexpr double kEpsilon = 1e-7;  // against division by zero
  const auto a = boxes.unbind(-1);
  const auto b = targets.unbind(-1);
  const auto shared = [&](int low, int high) {
    return at::minimum(a[high], b[high]) - at::maximum(a[low], b[low]);
  };
  const auto enclosing = [&](int low, int high) {
    return at::maximum(a[high], b[high]) - at::minimum(a[low], b[low]);
  };
  const at::Tensor width = shared(0, 2);
  const at::Tensor height = shared(1, 3);
  const at::Tensor both = at::where((width > 0) & (height > 0), width * height, 0);
  const at::Tensor either = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both;
  const at::Tensor around = enclosing(0, 2) * enclosing(1, 3);
  const at::Tensor giou = both / (either + kEpsilon) - (around - either) / (around + kEpsilon);
  return 1 - giou;
}

}  // namespace syncbn::models
