#include "cuda_emulator/peer_gather_kernel.h"

#include "cuda/peer_gather.cuh"
#include "cuda_emulator/emulator.h"

namespace syncbn::dist::detail::cuda {

void emulate(const PeerGatherArguments& arguments, uint64_t seed) {
  const cuda_emulator::Launch launch{.grid = dim3(1), .block = dim3(kPeerThreads), .seed = seed};
  cuda_emulator::run<PeerGatherShared>(
      launch, [&](PeerGatherShared& shared) { gather_from_peers(arguments, shared); });
}

}  // namespace syncbn::dist::detail::cuda
