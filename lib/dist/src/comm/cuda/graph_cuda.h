#pragma once

#include <memory>

#include <syncbn/dist/cuda_graph.h>

namespace syncbn::dist::detail {

std::unique_ptr<CudaGraph> make_graph();

}  // namespace syncbn::dist::detail
