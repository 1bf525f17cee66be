#pragma once

// Boxes are x1, y1, x2, y2 in pixels, in the last dimension of a tensor.

#include <ATen/core/Tensor.h>

namespace syncbn::models {

/// Intersection over union of each box of `a`, [M, 4], with each of `b`, [A, 4]: [M, A].
at::Tensor box_iou(const at::Tensor& a, const at::Tensor& b);

at::Tensor clip_boxes(const at::Tensor& boxes, double height, double width);

// ---- boxes relative to anchors: [..., 4] both -------------------------------------------------

/// Offsets of the centre in units of the anchor's size, and logarithms of the ratios of width and
/// height (Girshick et al., arXiv:1311.2524, appendix C).
at::Tensor encode_offsets(const at::Tensor& boxes, const at::Tensor& anchors);
/// The inverse of encode_offsets(). A box is at most 62.5 times as wide and high as its anchor.
at::Tensor decode_offsets(const at::Tensor& offsets, const at::Tensor& anchors);

/// Distances of the anchor's centre from left, top, right and bottom of the box, in units of the
/// anchor's size (Tian et al., arXiv:1904.01355, equation 1).
at::Tensor encode_distances(const at::Tensor& boxes, const at::Tensor& anchors);
/// The inverse of encode_distances().
at::Tensor decode_distances(const at::Tensor& distances, const at::Tensor& anchors);

// ---- non-maximum suppression ------------------------------------------------------------------

/// Drops a box if its IoU with a kept one of the same label and a higher score is above
/// `threshold`.
/// @param boxes [n, 4], float32 or float64
/// @param scores [n]; among equal scores, the first counts as the highest
/// @param labels [n]
/// @param limit maximum number of boxes to keep
/// @return indices of the kept boxes, highest score first, like torchvision's batched_nms
at::Tensor nms(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& labels,
               double threshold, int64_t limit);

}  // namespace syncbn::models
