#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>

#include <syncbn/data/dataset.h>
#include <syncbn/data/random.h>

namespace syncbn::data {

/// Type and memory format of normalize()'s result.
struct ImageFormat {
  at::ScalarType dtype = at::kFloat;  ///< float32, float16 or bfloat16
  /// Contiguous or ChannelsLast; Preserve: that of the uint8 images.
  at::MemoryFormat memory_format = at::MemoryFormat::Preserve;
};

/// (images / 255 - mean) / std, computed in float32 on the images' device. On a GPU, one kernel
/// that does not wait for the device, if dist::init_process_group() has loaded it.
/// @param images [B, C, H, W], uint8.
/// @param sizes Batch::sizes on the same device, or undefined. Pixels outside of an image become 0
///   after the division, as in torchvision's GeneralizedRCNNTransform.
/// @throws base::InternalError if mean and std do not have C values each.
at::Tensor normalize(const at::Tensor& images, const Normalization& normalization,
                     const at::Tensor& sizes = {}, const ImageFormat& format = {});

/// torchvision's MixUp: lambda * image + (1 - lambda) * previous image of the batch (the last one
/// for the first), lambda drawn from Beta(alpha, alpha).
/// @param batch data is [B, C, H, W], of any float type.
/// @return data is float32; target is [B, num_classes], float32: class probabilities for
/// cross_entropy_loss.
Batch mixup(const Batch& batch, int64_t num_classes, double alpha, SampleRandom& random);

/// torchvision's CutMix: like mixup(), but pastes a rectangle of the previous image. The rectangle
/// covers 1 - lambda of the area; it is clipped to the image and lambda adjusted accordingly.
Batch cutmix(const Batch& batch, int64_t num_classes, double alpha, SampleRandom& random);

}  // namespace syncbn::data
