#pragma once

// Pictures of what a network does, as Task::pictures() returns them.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>
#include <syncbn/data/image.h>
#include <syncbn/train/task.h>

namespace syncbn::train {

/// Describes the key `samples`.
template <class Options>
void describe_samples(config::Schema<Options>& schema, const std::string& what) {
  schema
      .field(
          "samples", &Options::samples,
          what + " in the picture that each evaluation leaves in the run's folder; 0: no picture")
      .between(0, 1024);
}

/// Converts a network's input, [N, C, H, W], back to images: uint8 [N, H, W, C] on the CPU.
at::Tensor pixels_of(const at::Tensor& images, const data::Normalization& normalization);

/// An image of `batch`, small enough to stand beside others: uint8 [H, W, 3] on the CPU.
struct Thumbnail {
  at::Tensor pixels;
  int64_t step = 1;  ///< pixels of the batch's image per pixel of this one
};
Thumbnail thumbnail(const data::Batch& batch, int64_t index,
                    const data::Normalization& normalization);

/// PASCAL VOC's colors of the classes: uint8 [256, 3]. Class 0, the background, is black.
const at::Tensor& class_colors();

/// The color of a class in a mask, and the brighter one of its boxes: uint8 [3].
at::Tensor mask_color(int64_t label);
at::Tensor box_color(int64_t label);

/// Draws the labels of pixels over an image: the background stays, `ignored` pixels become white.
/// @param pixels uint8 [H, W, 3]
/// @param labels int64 [H, W]
at::Tensor with_mask(const at::Tensor& pixels, const at::Tensor& labels, int64_t ignored);

/// Draws the part of a box's outline that lies within the image.
/// @param pixels uint8 [H, W, 3]
void draw_box(at::Tensor& pixels, const data::Box& box, int64_t label);

/// Images side by side, row by row, each in a cell as large as the largest image.
/// @param tiles uint8 [H, W, C], at least one
data::Image tiled(const std::vector<at::Tensor>& tiles, int64_t columns);

}  // namespace syncbn::train
