#include "batch_norm/batch_norm_cpu_walk.h"

#include <sys/mman.h>

#include <ATen/ops/empty_like.h>

namespace syncbn::dist::detail::cpu {

at::Tensor empty_like(const at::Tensor& tensor) {
  at::Tensor result = at::empty_like(tensor);
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(result.mutable_data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + result.nbytes()) / kHugePage * kHugePage;
  // Only advice: a kernel without huge pages refuses it.
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  return result;
}

}  // namespace syncbn::dist::detail::cpu
