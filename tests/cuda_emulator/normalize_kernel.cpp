#include "cuda_emulator/normalize_kernel.h"

#include "cuda/normalize.cuh"
#include "cuda_emulator/emulator.h"

namespace syncbn::data::cuda {
namespace {

/// Launches the kernel as normalize_launch.cu does.
template <class T>
void run(const NormalizeArguments& arguments, uint64_t seed) {
  const cuda_emulator::Launch launch{
      .grid = dim3(arguments.blocks(), arguments.rows()), .block = dim3(kThreads), .seed = seed};
  cuda_emulator::run(launch, 0, [&](void*) {
    arguments.to_channels_last ? normalize_images<T, true>(arguments)
                               : normalize_images<T, false>(arguments);
  });
}

}  // namespace

void emulate(const NormalizeArguments& arguments, ImageType type, uint64_t seed) {
  switch (type) {
    case ImageType::kFloat:
      return run<float>(arguments, seed);
    case ImageType::kHalf:
      return run<__half>(arguments, seed);
    case ImageType::kBFloat16:
      return run<__nv_bfloat16>(arguments, seed);
  }
}

}  // namespace syncbn::data::cuda
