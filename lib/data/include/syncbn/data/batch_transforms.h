#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <syncbn/data/dataset.h>
#include <syncbn/data/random.h>

namespace syncbn::data {

/// (images / 255 - mean) / std as float32, on the images' device and in their memory format.
/// @param images [B, C, H, W], uint8.
/// @param sizes Batch::sizes on the same device, or undefined. Pixels outside of an image become 0
///   after the division, as torchvision's GeneralizedRCNNTransform pads.
/// @throws base::InternalError if mean and std do not have C values each.
at::Tensor normalize(const at::Tensor& images, const Normalization& normalization,
                     const at::Tensor& sizes = {});

/// torchvision's MixUp: lambda * image + (1 - lambda) * previous image of the batch (the last one
/// for the first), lambda drawn from Beta(alpha, alpha).
/// @param batch data is [B, C, H, W], float32.
/// @return target is [B, num_classes], float32: class probabilities for cross_entropy_loss.
Batch mixup(const Batch& batch, int64_t num_classes, double alpha, SampleRandom& random);

/// torchvision's CutMix: like mixup(), but pastes a rectangle of the previous image. The rectangle
/// has 1 - lambda of the area; what falls outside of the image is cut off and lambda adjusted.
Batch cutmix(const Batch& batch, int64_t num_classes, double alpha, SampleRandom& random);

}  // namespace syncbn::data
