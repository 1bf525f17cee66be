#include "anchors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/meshgrid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

namespace syncbn::models {
namespace {

/// [ratios * scales, 4], rounded to whole pixels as in torchvision.
at::Tensor cell_anchors(const std::vector<float>& scales, const std::vector<float>& ratios) {
  const at::Tensor heights = at::tensor(ratios).sqrt().unsqueeze(1);
  const at::Tensor scale = at::tensor(scales).unsqueeze(0);
  const at::Tensor width = (heights.reciprocal() * scale).flatten();
  const at::Tensor height = (heights * scale).flatten();
  return (at::stack({-width, -height, width, height}, 1) / 2).round();
}

}  // namespace

AnchorGenerator::AnchorGenerator(const std::vector<std::vector<float>>& scales,
                                 const std::vector<float>& ratios) {
  for (const auto& scales_of_level : scales)
    cells_.push_back(cell_anchors(scales_of_level, ratios));
}

std::vector<at::Tensor> AnchorGenerator::operator()(const at::Tensor& images,
                                                    const std::vector<at::Tensor>& features) {
  // Images on GPUs may be bfloat16, which rounds positions beyond pixel 256 (float16: 2048).
  const at::ScalarType type = images.scalar_type();
  const at::TensorOptions options =
      at::TensorOptions(images.device()).dtype(at::isReducedFloatingType(type) ? at::kFloat : type);
  // Multiples of the level's stride, which is rounded down if the sizes do not divide.
  const auto places = [&](const at::Tensor& level, int64_t dim) {
    return at::arange(level.size(dim), options) * (images.size(dim) / level.size(dim));
  };
  std::vector<at::Tensor> anchors;
  for (size_t i = 0; i < cells_.size(); ++i) {
    const auto grid = at::meshgrid({places(features[i], 2), places(features[i], 3)}, "ij");
    const at::Tensor y = grid[0].flatten();
    const at::Tensor x = grid[1].flatten();
    const at::Tensor origins = at::stack({x, y, x, y}, 1).unsqueeze(1);
    // Cached: a copy from memory that is not pinned blocks until the GPU has it.
    if (cells_[i].device() != options.device() || cells_[i].dtype() != options.dtype()) {
      cells_[i] = cells_[i].to(options);
    }
    anchors.push_back((origins + cells_[i]).reshape({-1, 4}));
  }
  return anchors;
}

}  // namespace syncbn::models
