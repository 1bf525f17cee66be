#include "box_ops.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

namespace syncbn::models {
namespace {

/// Upper bound on logarithms of ratios before exp(): those of an untrained network may be large.
const double kMaxLogRatio = std::log(1000.0 / 16);

struct Centered {
  at::Tensor x, y, width, height;
};

Centered centered(const at::Tensor& boxes) {
  const auto sides = boxes.unbind(-1);
  const at::Tensor width = sides[2] - sides[0];
  const at::Tensor height = sides[3] - sides[1];
  return {sides[0] + 0.5 * width, sides[1] + 0.5 * height, width, height};
}

at::Tensor area(const at::Tensor& boxes) {
  return (boxes.select(-1, 2) - boxes.select(-1, 0)) * (boxes.select(-1, 3) - boxes.select(-1, 1));
}

/// @param a, b four sides of a box each
template <class Real>
Real iou_of(const Real* a, const Real* b) {
  const auto area = [](const Real* box) { return (box[2] - box[0]) * (box[3] - box[1]); };
  const Real width = std::max(Real{0}, std::min(a[2], b[2]) - std::max(a[0], b[0]));
  const Real height = std::max(Real{0}, std::min(a[3], b[3]) - std::max(a[1], b[1]));
  const Real both = width * height;
  return both / (area(a) + area(b) - both);
}

/// The indices that nms() keeps. The boxes are sorted by score.
template <class Real>
std::vector<int64_t> kept_boxes(const Real* boxes, const int64_t* labels, int64_t count,
                                double threshold, int64_t limit) {
  std::vector<int64_t> kept;
  std::unordered_map<int64_t, std::vector<int64_t>> kept_of_label;
  for (int64_t i = 0; i < count && std::ssize(kept) < limit; ++i) {
    std::vector<int64_t>& better = kept_of_label[labels[i]];
    const bool is_dropped = std::ranges::any_of(better, [&](int64_t other) {
      return iou_of(boxes + 4 * other, boxes + 4 * i) > threshold;
    });
    if (is_dropped) continue;
    better.push_back(i);
    kept.push_back(i);
  }
  return kept;
}

}  // namespace

at::Tensor box_iou(const at::Tensor& a, const at::Tensor& b) {
  const auto sides_a = a.unsqueeze(1).unbind(-1);
  const auto sides_b = b.unsqueeze(0).unbind(-1);
  const auto shared = [&](int low, int high) {
    return at::minimum(sides_a[high], sides_b[high])
        .sub_(at::maximum(sides_a[low], sides_b[low]))
        .clamp_min_(0);
  };
  const at::Tensor both = shared(0, 2).mul_(shared(1, 3));
  return both / (area(a).unsqueeze(1) + area(b)).sub_(both);
}

at::Tensor clip_boxes(const at::Tensor& boxes, double height, double width) {
  const auto sides = boxes.unbind(-1);
  return at::stack({sides[0].clamp(0, width), sides[1].clamp(0, height), sides[2].clamp(0, width),
                    sides[3].clamp(0, height)},
                   -1);
}

at::Tensor encode_offsets(const at::Tensor& boxes, const at::Tensor& anchors) {
  const Centered box = centered(boxes);
  const Centered anchor = centered(anchors);
  return at::stack({(box.x - anchor.x) / anchor.width, (box.y - anchor.y) / anchor.height,
                    (box.width / anchor.width).log(), (box.height / anchor.height).log()},
                   -1);
}

at::Tensor decode_offsets(const at::Tensor& offsets, const at::Tensor& anchors) {
  const auto values = offsets.unbind(-1);
  const Centered anchor = centered(anchors);
  const at::Tensor x = values[0] * anchor.width + anchor.x;
  const at::Tensor y = values[1] * anchor.height + anchor.y;
  const at::Tensor half_width = 0.5 * (values[2].clamp_max(kMaxLogRatio).exp() * anchor.width);
  const at::Tensor half_height = 0.5 * (values[3].clamp_max(kMaxLogRatio).exp() * anchor.height);
  return at::stack({x - half_width, y - half_height, x + half_width, y + half_height}, -1);
}

at::Tensor encode_distances(const at::Tensor& boxes, const at::Tensor& anchors) {
  const auto sides = boxes.unbind(-1);
  const Centered anchor = centered(anchors);
  return at::stack({(anchor.x - sides[0]) / anchor.width, (anchor.y - sides[1]) / anchor.height,
                    (sides[2] - anchor.x) / anchor.width, (sides[3] - anchor.y) / anchor.height},
                   -1);
}

at::Tensor decode_distances(const at::Tensor& distances, const at::Tensor& anchors) {
  const auto values = distances.unbind(-1);
  const Centered anchor = centered(anchors);
  return at::stack({anchor.x - values[0] * anchor.width, anchor.y - values[1] * anchor.height,
                    anchor.x + values[2] * anchor.width, anchor.y + values[3] * anchor.height},
                   -1);
}

at::Tensor nms(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& labels,
               double threshold, int64_t limit) {
  const at::Tensor order = scores.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/true);
  // Suppression is sequential, so it always runs on the CPU.
  const at::Tensor sorted = boxes.index_select(0, order).cpu();
  const at::Tensor sorted_labels = labels.index_select(0, order).cpu();
  std::vector<int64_t> kept;
  AT_DISPATCH_FLOATING_TYPES(sorted.scalar_type(), "nms", [&] {
    kept = kept_boxes(sorted.const_data_ptr<scalar_t>(), sorted_labels.const_data_ptr<int64_t>(),
                      sorted.size(0), threshold, limit);
  });
  return order.index_select(0, at::tensor(kept, at::kLong).to(order.device()));
}

}  // namespace syncbn::models
