// Converts a batch of uint8 images to a network's input in one launch. Part of
// libsyncbn_dist_cuda.so: data::normalize() looks up the operator, so that lib/data needs no CUDA.

#include <cstdint>
#include <optional>

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/normalize_launch.h"

namespace syncbn::data::cuda {
namespace {

ImageType image_type(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return ImageType::kHalf;
    case at::kBFloat16:
      return ImageType::kBFloat16;
    default:
      TORCH_CHECK(type == at::kFloat, "normalize: no images of ", type, " are made");
      return ImageType::kFloat;
  }
}

at::Tensor normalize(const at::Tensor& images, at::ArrayRef<double> mean, at::ArrayRef<double> std,
                     const std::optional<at::Tensor>& sizes, at::ScalarType type,
                     at::MemoryFormat memory_format) {
  const auto channels = static_cast<int64_t>(mean.size());
  TORCH_CHECK(
      images.is_cuda() && images.scalar_type() == at::kByte && images.dim() == 4 &&
          channels <= kMaxChannels && images.size(1) == channels && std.size() == mean.size(),
      "normalize: expected bytes of [samples, channels, height, width] on a GPU, and a mean "
      "and deviation for each of at most ",
      kMaxChannels, " channels");
  TORCH_CHECK(!sizes || (sizes->is_cuda() && sizes->scalar_type() == at::kLong),
              "normalize: expected sizes as int64 on a GPU");
  const c10::cuda::CUDAGuard guard(images.device());
  const bool from_channels_last = images.is_contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor dense = from_channels_last ? images : images.contiguous();
  at::Tensor output = at::empty(images.sizes(), images.options().dtype(type), memory_format);
  if (output.numel() == 0) return output;
  const at::Tensor limits = sizes ? sizes->contiguous() : at::Tensor();
  NormalizeArguments arguments{.images = dense.const_data_ptr<uint8_t>(),
                               .output = output.mutable_data_ptr(),
                               .sizes = sizes ? limits.const_data_ptr<int64_t>() : nullptr,
                               .samples = images.size(0),
                               .channels = static_cast<int>(images.size(1)),
                               .height = static_cast<int>(images.size(2)),
                               .width = static_cast<int>(images.size(3)),
                               .from_channels_last = from_channels_last,
                               .to_channels_last = memory_format == at::MemoryFormat::ChannelsLast};
  const auto is_multiple = [](const void* address, uintptr_t size) {
    return reinterpret_cast<uintptr_t>(address) % size == 0;
  };
  arguments.aligned = arguments.values() % kPack == 0 && is_multiple(arguments.images, kPack) &&
                      is_multiple(arguments.output, 16);
  for (size_t channel = 0; channel < mean.size(); ++channel) {
    arguments.mean[channel] = static_cast<float>(mean[channel]) * 255;
    arguments.std[channel] = static_cast<float>(std[channel]) * 255;
  }
  launch(arguments, image_type(type), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return output;
}

}  // namespace
}  // namespace syncbn::data::cuda

TORCH_LIBRARY_FRAGMENT(syncbn, library) {
  library.def(
      "normalize(Tensor images, float[] mean, float[] std, Tensor? sizes, ScalarType dtype, "
      "MemoryFormat memory_format) -> Tensor");
}

TORCH_LIBRARY_IMPL(syncbn, CUDA, library) {
  library.impl("normalize", syncbn::data::cuda::normalize);
}
