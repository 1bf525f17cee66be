#include "cuda/normalize_launch.h"

#include "cuda/normalize.cuh"

namespace syncbn::data::cuda {
namespace {

// Without __grid_constant__, each thread would copy the arguments to local memory, because it
// indexes `mean` and `std` by channel.
template <class T, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    normalize_kernel(const __grid_constant__ NormalizeArguments arguments) {
  normalize_images<T, kChannelsLast>(arguments);
}

template <class T>
void launch_of(const NormalizeArguments& arguments, cudaStream_t stream) {
  const dim3 grid(arguments.blocks(), arguments.rows());
  arguments.to_channels_last ? normalize_kernel<T, true><<<grid, kThreads, 0, stream>>>(arguments)
                             : normalize_kernel<T, false><<<grid, kThreads, 0, stream>>>(arguments);
}

}  // namespace

void launch(const NormalizeArguments& arguments, ImageType type, cudaStream_t stream) {
  switch (type) {
    case ImageType::kFloat:
      return launch_of<float>(arguments, stream);
    case ImageType::kHalf:
      return launch_of<__half>(arguments, stream);
    case ImageType::kBFloat16:
      return launch_of<__nv_bfloat16>(arguments, stream);
  }
}

}  // namespace syncbn::data::cuda
