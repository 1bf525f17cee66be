#include "batch_norm/batch_norm_cpu_walk.h"

#include <sys/mman.h>

#include <ATen/ops/empty_like.h>

namespace syncbn::dist::detail::cpu {

at::Tensor empty_like(const at::Tensor& tensor) {
  at::Tensor result = at::empty_like(tensor);
  constexpr size_t kHugePage = size_t{2} << 20;
  char* const begin = static_cast<char*>(result.mutable_data_ptr());
  const size_t skipped = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (result.nbytes() >= skipped + kHugePage) {
    const size_t whole = (result.nbytes() - skipped) / kHugePage * kHugePage;
    // Only advice: a kernel without huge pages refuses it.
    ::madvise(begin + skipped, whole, MADV_HUGEPAGE);
  }
  return result;
}

}  // namespace syncbn::dist::detail::cpu
