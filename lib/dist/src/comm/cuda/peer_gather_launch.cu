#include "cuda/peer_gather_launch.h"

#include "cuda/peer_gather.cuh"

namespace syncbn::dist::detail::cuda {
namespace {

__global__ void __launch_bounds__(kPeerThreads) peer_gather_kernel(PeerGatherArguments arguments) {
  __shared__ PeerGatherShared shared;
  gather_from_peers(arguments, shared);
}

}  // namespace

void launch(const PeerGatherArguments& arguments, cudaStream_t stream) {
  peer_gather_kernel<<<1, kPeerThreads, 0, stream>>>(arguments);
}

}  // namespace syncbn::dist::detail::cuda
