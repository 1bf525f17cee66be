#pragma once

#include <torch/nn/module.h>

namespace syncbn::models {

/// The faster memory format for a network: channels_last for two-dimensional convolutions,
/// contiguous otherwise.
at::MemoryFormat preferred_memory_format(const torch::nn::Module& module);

/// Converts parameters and buffers of four dimensions in place, as Python's
/// module.to(memory_format=…) does. Tensors remain the same objects. Does not convert inputs. Call
/// it before DistributedDataParallel is made, which reads the strides. Not thread-safe.
void to_memory_format(torch::nn::Module& module, at::MemoryFormat format);

}  // namespace syncbn::models
