#include "batch_to_device.h"

#include <syncbn/data/batch_transforms.h>

namespace syncbn::train {

at::Tensor BatchToDevice::input(const data::Batch& batch) const {
  at::Tensor data = moved(batch.data);
  if (data.scalar_type() == at::kByte) data = data::normalize(data, options_.normalization);
  return data.dim() == 4 ? data.contiguous(options_.memory_format) : data;
}

at::Tensor BatchToDevice::target(const data::Batch& batch) const {
  return moved(batch.target);
}

at::Tensor BatchToDevice::moved(const at::Tensor& tensor) const {
  return tensor.to(options_.device, /*non_blocking=*/options_.pinned);
}

}  // namespace syncbn::train
