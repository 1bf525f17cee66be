#pragma once

#include <ATen/core/Tensor.h>

namespace syncbn::models {

/// Focal loss (Lin et al., arXiv:1708.02002) of each anchor, with alpha 0.25 and gamma 2: the sum
/// of the classes' binary losses.
/// @param logits [..., A, K]
/// @param labels [..., A], int64: the right class; negative: none is right
/// @return [..., A]
at::Tensor focal_loss(const at::Tensor& logits, const at::Tensor& labels);

/// 1 - generalized IoU (Rezatofighi et al., arXiv:1902.09630) of each pair of boxes.
/// @param boxes, targets [..., 4]: x1, y1, x2, y2
/// @return [...]
at::Tensor giou_loss(const at::Tensor& boxes, const at::Tensor& targets);

}  // namespace syncbn::models
