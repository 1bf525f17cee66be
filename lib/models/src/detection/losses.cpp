#include "losses.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>

namespace syncbn::models {

namespace {

constexpr double kAlpha = 0.25;

/// -p^2 log(1 - p), where p is the sigmoid of x: the loss of a wrong class with the logit x, or of
/// the right class with the logit -x.
at::Tensor focal_term(const at::Tensor& x) {
  // Beyond the threshold, log(1 + exp(x)) is x even in float64.
  return at::sigmoid(x).square() * at::softplus(x, /*beta=*/1, /*threshold=*/40);
}

}  // namespace

at::Tensor focal_loss(const at::Tensor& logits, const at::Tensor& labels) {
  // Treats all classes as wrong, then replaces the right class's term: this needs fewer passes over
  // all logits than a target for each class.
  const at::Tensor none = (1 - kAlpha) * focal_term(logits).sum(-1);
  const at::Tensor right = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1);
  const at::Tensor exchanged = kAlpha * focal_term(-right) - (1 - kAlpha) * focal_term(right);
  return none + exchanged.masked_fill(labels < 0, 0);
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
