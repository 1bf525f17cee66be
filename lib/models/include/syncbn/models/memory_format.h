#pragma once

// torch::nn::Module: what is laid out.
#include <torch/nn/module.h>

namespace syncbn::models {

/// The memory format in which a network is faster where it is now: channels_last for
/// two-dimensional convolutions on CPUs, contiguous otherwise.
at::MemoryFormat preferred_memory_format(const torch::nn::Module& module);

/// Lays out parameters and buffers of four dimensions, in place, as Python's
/// module.to(memory_format=…) does; inputs are the caller's part. Tensors remain the same objects;
/// call it before DistributedDataParallel looks at their strides. Not thread-safe.
void to_memory_format(torch::nn::Module& module, at::MemoryFormat format);

}  // namespace syncbn::models
