// Stand-ins for the project's own kernels.
#include <algorithm>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

/// lib/dist/src/parallel/cuda/count_to_int.cu
void count_to_int(dim3 /*grid*/, dim3 /*block*/, size_t /*shared_bytes*/, const double* count,
                  int* result) {
  constexpr double kMax = 2147483647.0;
  *result = static_cast<int>(std::min(*count, kMax));
}

const bool are_defined = [] {
  define_kernel("count_to_int", count_to_int);
  return true;
}();

}  // namespace
}  // namespace fake_cuda
