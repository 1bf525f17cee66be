#pragma once

#include <utility>

// at::Tensor: what a batch consists of.
#include <ATen/core/Tensor.h>

#include <syncbn/data/dataset.h>

namespace syncbn::train {

/// Brings batches to the device, as the network takes them.
class BatchToDevice {
 public:
  struct Options {
    at::Device device;
    /// Batches are in pinned memory, from which is copied while the program goes on.
    bool pinned = false;
    at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;  ///< of images
    data::Normalization normalization;                              ///< of images in bytes
  };

  explicit BatchToDevice(Options options) : options_(std::move(options)) {}

  at::Tensor input(const data::Batch& batch) const;
  at::Tensor target(const data::Batch& batch) const;

 private:
  at::Tensor moved(const at::Tensor& tensor) const;

  const Options options_;
};

}  // namespace syncbn::train
