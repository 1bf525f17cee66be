#include "cuda/compute_capability.h"

namespace syncbn::dist::detail {

int lowest_compute_capability() {
  constexpr int kBuilt[] = {__CUDA_ARCH_LIST__};  // from nvcc, in ascending order: 800, 900
  return kBuilt[0] / 10;
}

}  // namespace syncbn::dist::detail
