// The CUDA kernel that gathers rows through the memory of GPUs, run by the emulator on memory that
// threads or processes of the host share.
#pragma once

#include <cstdint>

#include "cuda/peer_gather_arguments.h"

namespace syncbn::dist::detail::cuda {

void emulate(const PeerGatherArguments& arguments, uint64_t seed = 0);

}  // namespace syncbn::dist::detail::cuda
