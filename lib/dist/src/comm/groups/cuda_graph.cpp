#include <syncbn/dist/cuda_graph.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include "groups/cuda_support.h"

namespace syncbn::dist {

std::unique_ptr<CudaGraph> make_cuda_graph() {
  const detail::CudaSupport* const cuda = detail::cuda_support();
  if (cuda == nullptr) {
    throw base::UserError(
        fmt::format("a CUDA graph needs a GPU: {}", detail::cuda_support_error()));
  }
  return cuda->make_graph();
}

}  // namespace syncbn::dist
