#include "box_ops.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace syncbn::models {
namespace {

/// Bounds what exp() makes of an untrained network's output.
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

/// The indices that nms() keeps among boxes in the order of their scores.
/// @param sides [4, count]: all x1, all y1, ...
template <class Real>
std::vector<int64_t> kept_boxes(const Real* sides, const int64_t* labels, int64_t count,
                                double threshold, int64_t limit) {
  const Real* const x1 = sides;
  const Real* const y1 = x1 + count;
  const Real* const x2 = y1 + count;
  const Real* const y2 = x2 + count;
  std::vector<Real> areas(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    areas[static_cast<size_t>(i)] = (x2[i] - x1[i]) * (y2[i] - y1[i]);
  }
  const Real* const area = areas.data();
  std::vector<int64_t> is_dropped(static_cast<size_t>(count));
  int64_t* const dropped = is_dropped.data();
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < count && std::ssize(kept) < limit; ++i) {
    if (dropped[i] != 0) continue;
    kept.push_back(i);
    for (int64_t j = i + 1; j < count; ++j) {  // without branches: vectorised
      const Real width = std::max(Real{0}, std::min(x2[i], x2[j]) - std::max(x1[i], x1[j]));
      const Real height = std::max(Real{0}, std::min(y2[i], y2[j]) - std::max(y1[i], y1[j]));
      const Real both = width * height;
      const double iou = both / (area[i] + area[j] - both);
      dropped[j] |=
          static_cast<int64_t>(iou > threshold) & static_cast<int64_t>(labels[i] == labels[j]);
    }
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
  // One box decides after the other: on the CPU, wherever the boxes are.
  const at::Tensor sides = boxes.index_select(0, order).t().cpu().contiguous();
  const at::Tensor sorted_labels = labels.index_select(0, order).cpu();
  std::vector<int64_t> kept;
  AT_DISPATCH_FLOATING_TYPES(sides.scalar_type(), "nms", [&] {
    kept = kept_boxes(sides.const_data_ptr<scalar_t>(), sorted_labels.const_data_ptr<int64_t>(),
                      sides.size(1), threshold, limit);
  });
  return order.index_select(0, at::tensor(kept, at::kLong).to(order.device()));
}

}  // namespace syncbn::models
