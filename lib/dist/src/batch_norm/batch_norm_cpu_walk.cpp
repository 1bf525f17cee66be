#include "batch_norm/batch_norm_cpu_walk.h"

#include <syncbn/base/heap.h>

#include <ATen/ops/empty_like.h>

namespace syncbn::dist::detail::cpu {

at::Tensor empty_like(const at::Tensor& tensor) {
  at::Tensor result = at::empty_like(tensor);
  base::advise_huge_pages(result.mutable_data_ptr(), result.nbytes());
  return result;
}

}  // namespace syncbn::dist::detail::cpu
