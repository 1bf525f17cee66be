#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/cuda/CUDAStream.h>

namespace fake_cuda {

/// A CPU tensor over the bytes of a CUDA tensor. It does not keep the memory alive: as in a kernel,
/// the memory may belong to another tensor when it is used too late. Returns other tensors
/// unchanged.
at::Tensor host_tensor(const at::Tensor& tensor);

/// Fills tensors of host_tensor() with NaN, in the order of the stream.
void poison(const torch::jit::Stack& tensors, c10::cuda::CUDAStream stream);

}  // namespace fake_cuda
