#include "records/pictures.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <span>

namespace syncbn::train {
namespace {

/// Upper bound on the longer side of a thumbnail, in pixels.
constexpr int64_t kMaxSide = 512;
constexpr int64_t kLineWidth = 2;
constexpr int64_t kNumColors = 256;

/// Fills the part of [top, bottom) x [left, right) that is within the image.
void fill(at::Tensor& pixels, int64_t top, int64_t bottom, int64_t left, int64_t right,
          const at::Tensor& color) {
  top = std::clamp<int64_t>(top, 0, pixels.size(0));
  bottom = std::clamp<int64_t>(bottom, top, pixels.size(0));
  left = std::clamp<int64_t>(left, 0, pixels.size(1));
  right = std::clamp<int64_t>(right, left, pixels.size(1));
  pixels.narrow(0, top, bottom - top).narrow(1, left, right - left).copy_(color);
}

}  // namespace

at::Tensor pixels_of(const at::Tensor& images, const data::Normalization& normalization) {
  const auto options = images.options().dtype(at::kFloat);
  const at::Tensor std = at::tensor(normalization.std, options).view({1, -1, 1, 1});
  const at::Tensor mean = at::tensor(normalization.mean, options).view({1, -1, 1, 1});
  const at::Tensor pixels = (images * std + mean).clamp(0, 1).mul(255).round();
  return pixels.to(at::kByte).permute({0, 2, 3, 1}).cpu();
}

Thumbnail thumbnail(const data::Batch& batch, int64_t index,
                    const data::Normalization& normalization) {
  at::Tensor image = batch.data[index];
  if (batch.sizes.defined()) {
    const at::Tensor size = batch.sizes[index].cpu();
    image = image.narrow(1, 0, size[0].item<int64_t>()).narrow(2, 0, size[1].item<int64_t>());
  }
  const int64_t side = std::max(image.size(1), image.size(2));
  const int64_t step = (side + kMaxSide - 1) / kMaxSide;
  image = image.slice(1, 0, std::nullopt, step).slice(2, 0, std::nullopt, step);
  const at::Tensor pixels = pixels_of(image.unsqueeze(0), normalization)[0];
  return {.pixels = pixels.expand({pixels.size(0), pixels.size(1), 3}).contiguous(), .step = step};
}

const at::Tensor& class_colors() {
  // As in VOC's development kit: bits 0, 3, 6 of the label become the highest bits of red, and so
  // on.
  static const at::Tensor colors = [] {
    at::Tensor all = at::zeros({kNumColors, 3}, at::kByte);
    for (int64_t label = 0; label < kNumColors; ++label) {
      uint8_t* const color = all.mutable_data_ptr<uint8_t>() + 3 * label;
      for (int i = 0; i < 8; ++i) color[i % 3] |= ((label >> i) & 1) << (7 - i / 3);
    }
    return all;
  }();
  return colors;
}

at::Tensor with_mask(const at::Tensor& pixels, const at::Tensor& labels, int64_t ignored) {
  const at::Tensor known = labels.clamp(0, kNumColors - 1);
  const at::Tensor color =
      class_colors().index_select(0, known.flatten()).view({labels.size(0), labels.size(1), 3});
  const at::Tensor mixed = pixels.to(at::kInt).add(color).div(2, "floor").to(at::kByte);
  const at::Tensor shown = at::where(labels.eq(0).unsqueeze(2), pixels, mixed);
  return shown.masked_fill(labels.eq(ignored).unsqueeze(2), 255);
}

at::Tensor mask_color(int64_t label) {
  return class_colors()[std::min(label, kNumColors - 1)];
}

at::Tensor box_color(int64_t label) {
  const at::Tensor dark = class_colors()[1 + label % (kNumColors - 1)];
  return dark.to(at::kInt).mul(255).div(dark.max(), "floor").to(at::kByte);
}

void draw_box(at::Tensor& pixels, const data::Box& box, int64_t label) {
  const at::Tensor color = box_color(label);
  const int64_t right = box.left + box.width;
  const int64_t bottom = box.top + box.height;
  fill(pixels, box.top, box.top + kLineWidth, box.left, right, color);
  fill(pixels, bottom - kLineWidth, bottom, box.left, right, color);
  fill(pixels, box.top, bottom, box.left, box.left + kLineWidth, color);
  fill(pixels, box.top, bottom, right - kLineWidth, right, color);
}

data::Image tiled(const std::vector<at::Tensor>& tiles, int64_t columns) {
  int64_t height = 0;
  int64_t width = 0;
  for (const at::Tensor& tile : tiles) {
    height = std::max(height, tile.size(0));
    width = std::max(width, tile.size(1));
  }
  const int64_t rows = (std::ssize(tiles) + columns - 1) / columns;
  at::Tensor grid = at::zeros({rows * height, columns * width, tiles.front().size(2)}, at::kByte);
  for (int64_t i = 0; i < std::ssize(tiles); ++i) {
    const at::Tensor& tile = tiles[static_cast<size_t>(i)];
    grid.narrow(0, i / columns * height, tile.size(0))
        .narrow(1, i % columns * width, tile.size(1))
        .copy_(tile);
  }
  data::Image image(grid.size(1), grid.size(0), grid.size(2));
  std::ranges::copy(std::span(grid.const_data_ptr<uint8_t>(), image.pixels.size()),
                    image.pixels.begin());
  return image;
}

}  // namespace syncbn::train
