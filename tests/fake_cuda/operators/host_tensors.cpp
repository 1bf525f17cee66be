#include "host_tensors.h"

#include <c10/core/Allocator.h>
#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDAException.h>

#include <cstring>

#include "fake_cuda.h"

namespace fake_cuda {

at::Tensor host_tensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const c10::Storage& cuda = tensor.storage();
  c10::Storage storage(c10::Storage::use_byte_size_t(), cuda.nbytes(),
                       c10::DataPtr(host(cuda.data()), at::kCPU), c10::GetAllocator(at::kCPU),
                       /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* const impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

void poison(const torch::jit::Stack& tensors, c10::cuda::CUDAStream stream) {
  for (const c10::IValue& value : tensors) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const c10::Storage storage = value.toTensor().storage();
    C10_CUDA_CHECK(enqueue(stream, [bytes = storage.mutable_data(), size = storage.nbytes()] {
      if (size > 0) std::memset(bytes, 0xFF, size);
    }));
  }
}

}  // namespace fake_cuda
