#pragma once

#include <torch/nn/module.h>

namespace syncbn::models {

/// The faster memory format for a network: channels_last if it has two-dimensional convolutions,
/// otherwise contiguous.
at::MemoryFormat preferred_memory_format(const torch::nn::Module& module);

/// Converts parameters and buffers of four dimensions in place, like Python's
/// module.to(memory_format=…). Tensors remain the same objects. Does not convert inputs. Call this
/// before constructing DistributedDataParallel, which reads the strides. Not thread-safe.
void to_memory_format(torch::nn::Module& module, at::MemoryFormat format);

}  // namespace syncbn::models
