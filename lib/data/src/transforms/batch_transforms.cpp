#include <syncbn/data/batch_transforms.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include <syncbn/base/error.h>

namespace syncbn::data {
namespace {

/// [1, C, 1, 1], float32. Does not wait for the device.
at::Tensor per_channel(const std::vector<double>& values, const at::Tensor& images) {
  if (std::ssize(values) != images.size(1)) {
    throw base::InternalError(
        fmt::format("{} values of a normalisation for {} channels", values.size(), images.size(1)));
  }
  const auto options = at::TensorOptions(at::kFloat).pinned_memory(images.is_cuda());
  return at::tensor(values, options).to(images.device(), /*non_blocking=*/true).view({1, -1, 1, 1});
}

/// [B, num_classes]: lambda for a sample's own label, 1 - lambda for the previous sample's.
at::Tensor mixed_targets(const at::Tensor& target, int64_t num_classes, double lambda) {
  const at::Tensor shares = at::one_hot(target, num_classes).to(at::kFloat);
  return shares * lambda + shares.roll(1, 0) * (1 - lambda);
}

/// [B, 1, H, W]: whether a pixel is outside of its image.
at::Tensor outside(const at::Tensor& images, const at::Tensor& sizes) {
  const at::Tensor rows = at::arange(images.size(2), sizes.options()).view({1, 1, -1, 1});
  const at::Tensor columns = at::arange(images.size(3), sizes.options()).view({1, 1, 1, -1});
  const at::Tensor limits = sizes.view({-1, 2, 1, 1});
  return rows.ge(limits.narrow(1, 0, 1)).logical_or(columns.ge(limits.narrow(1, 1, 1)));
}

}  // namespace

at::Tensor normalize(const at::Tensor& images, const Normalization& normalization,
                     const at::Tensor& sizes, const ImageFormat& format) {
  const auto& [mean, std] = normalization;
  at::MemoryFormat memory_format = format.memory_format;
  if (memory_format == at::MemoryFormat::Preserve) {
    memory_format = images.suggest_memory_format();
  }
  at::Tensor normalized = (images.to(at::kFloat) - per_channel(mean, images) * 255)
                              .div_(per_channel(std, images) * 255);
  if (sizes.defined()) normalized.masked_fill_(outside(images, sizes), 0);
  return normalized.to(format.dtype).contiguous(memory_format);
}

Batch mixup(const Batch& batch, int64_t num_classes, double alpha, SampleRandom& random) {
  const double lambda = random.symmetric_beta(alpha);
  const at::Tensor images = batch.data.to(at::kFloat);
  return {images * lambda + images.roll(1, 0) * (1 - lambda),
          mixed_targets(batch.target, num_classes, lambda)};
}

Batch cutmix(const Batch& batch, int64_t num_classes, double alpha, SampleRandom& random) {
  const int64_t height = batch.data.size(2);
  const int64_t width = batch.data.size(3);
  const double side = 0.5 * std::sqrt(1 - random.symmetric_beta(alpha));
  const int64_t x = random.below(width);
  const int64_t y = random.below(height);
  const auto half_width = static_cast<int64_t>(side * static_cast<double>(width));
  const auto half_height = static_cast<int64_t>(side * static_cast<double>(height));
  const int64_t left = std::max<int64_t>(x - half_width, 0);
  const int64_t right = std::min(x + half_width, width);
  const int64_t top = std::max<int64_t>(y - half_height, 0);
  const int64_t bottom = std::min(y + half_height, height);
  const auto part = [&](const at::Tensor& images) {
    return images.slice(2, top, bottom).slice(3, left, right);
  };
  at::Tensor data = batch.data.clone();
  part(data).copy_(part(batch.data.roll(1, 0)));
  const double pasted =
      static_cast<double>((right - left) * (bottom - top)) / static_cast<double>(width * height);
  return {std::move(data), mixed_targets(batch.target, num_classes, 1 - pasted)};
}

}  // namespace syncbn::data
