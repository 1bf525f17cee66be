#pragma once

#include <cuda_runtime_api.h>

#include "cuda/peer_gather_arguments.h"

namespace syncbn::dist::detail::cuda {

void launch(const PeerGatherArguments& arguments, cudaStream_t stream);

}  // namespace syncbn::dist::detail::cuda
