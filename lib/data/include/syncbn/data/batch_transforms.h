#pragma once

#include <cstdint>

// at::Tensor.
#include <ATen/core/Tensor.h>

#include <syncbn/data/dataset.h>
#include <syncbn/data/random.h>

namespace syncbn::data {

/// (images / 255 - mean) / std as float32, on the images' device: batches travel as uint8.
/// `images` is [B, C, H, W], uint8; its memory format is kept.
/// @throws base::InternalError when mean and std do not have C values each.
at::Tensor normalize(const at::Tensor& images, const Normalization& normalization);

/// Mixes each image with its neighbour, the last one with the first's, as torchvision's MixUp does:
/// lambda of each and 1 - lambda of the one before, lambda from Beta(alpha, alpha).
/// `batch.data` is [B, C, H, W], float32; the result's target is [B, num_classes], float32: the
/// shares of the classes, which cross_entropy_loss takes.
Batch mixup(const Batch& batch, int64_t num_classes, double alpha, SampleRandom& random);

/// Pastes a rectangle of the neighbour instead, as torchvision's CutMix does: of 1 - lambda of the
/// area where it lies within the image, and lambda as the area that is left.
Batch cutmix(const Batch& batch, int64_t num_classes, double alpha, SampleRandom& random);

}  // namespace syncbn::data
