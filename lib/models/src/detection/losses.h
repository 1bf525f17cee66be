#pragma once

#include <ATen/core/Tensor.h>

namespace syncbn::models {

/// Focal loss of independent classes (Lin et al., arXiv:1708.02002), with alpha 0.25 and gamma 2.
/// @param targets of the logits' shape: 1 or 0
/// @return of the same shape
at::Tensor sigmoid_focal_loss(const at::Tensor& logits, const at::Tensor& targets);

/// 1 - generalized IoU (Rezatofighi et al., arXiv:1902.09630) of each pair of boxes.
/// @param boxes, targets [..., 4]: x1, y1, x2, y2
/// @return [...]
at::Tensor giou_loss(const at::Tensor& boxes, const at::Tensor& targets);

}  // namespace syncbn::models
