#include "batch_norm/batch_norm_cpu_walk.h"

#include <syncbn/base/heap.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

// ATen's parallel_for is a template, and has threads only where it is compiled with OpenMP, as this
// file is.

namespace syncbn::dist::detail::cpu {

void parallel_for(int64_t end, int64_t grain, c10::function_ref<void(int64_t, int64_t)> run) {
  at::parallel_for(0, end, grain, run);
}

at::Tensor empty_like(const at::Tensor& tensor) {
  at::Tensor result = at::empty_like(tensor);
  base::advise_huge_pages(result.mutable_data_ptr(), result.nbytes());
  return result;
}

}  // namespace syncbn::dist::detail::cpu
