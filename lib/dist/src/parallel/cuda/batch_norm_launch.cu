#include "cuda/batch_norm_launch.h"

#include "cuda/backward.cuh"
#include "cuda/forward.cuh"

namespace syncbn::dist::detail::cuda {
namespace {

// One kernel per element type and layout. The kernels check for ReLU and residual at run time,
// which costs nothing compared with memory accesses.

template <class T, bool kRows>
__global__ void __launch_bounds__(kThreads<kRows>) moments_kernel(MomentsArguments arguments) {
  __shared__ ReductionShared<Moments, kRows> shared;
  compute_moments<T, kRows>(arguments, shared);
}

__global__ void __launch_bounds__(kPlaneThreads) merge_kernel(MergeArguments arguments) {
  merge_moments(arguments);
}

template <class T, bool kRows>
__global__ void __launch_bounds__(kThreads<kRows>) forward_kernel(ForwardArguments arguments) {
  __shared__ ForwardShared<Wide<T>, kRows> shared;
  normalize<T, kRows>(arguments, shared);
}

template <class T, bool kRows>
__global__ void __launch_bounds__(kThreads<kRows>) reduce_kernel(ReduceArguments arguments) {
  __shared__ ReductionShared<ChannelSums, kRows> shared;
  reduce_gradient<T, kRows>(arguments, shared);
}

template <class T, bool kRows>
__global__ void __launch_bounds__(kThreads<kRows>)
    elementwise_kernel(ElementwiseArguments arguments) {
  __shared__ BackwardShared<Wide<T>, kRows> shared;
  differentiate_input<T, kRows>(arguments, shared);
}

template <class Arguments>
using Kernel = void (*)(Arguments);

/// @param by_type the kernels for rows and for planes of each ValueType, in the order of ValueType
template <class Arguments>
void launch(const Arguments& arguments, const Kernel<Arguments> (&by_type)[4][2], ValueType type,
            cudaStream_t stream) {
  const Layout& layout = arguments.shape.layout;
  const dim3 grid(static_cast<unsigned>(layout.tiles()),
                  static_cast<unsigned>(arguments.shape.slices));
  by_type[static_cast<int>(type)]
         [layout.rows ? 0 : 1]<<<grid, static_cast<unsigned>(layout.threads()), 0, stream>>>(
             arguments);
}

}  // namespace

#define SYNCBN_BY_TYPE(kernel)                                                                  \
  {                                                                                             \
    {kernel<float, true>, kernel<float, false>}, {kernel<double, true>, kernel<double, false>}, \
        {kernel<__half, true>, kernel<__half, false>}, {                                        \
      kernel<__nv_bfloat16, true>, kernel<__nv_bfloat16, false>                                 \
    }                                                                                           \
  }

void launch(const MomentsArguments& arguments, ValueType type, cudaStream_t stream) {
  launch<MomentsArguments>(arguments, SYNCBN_BY_TYPE(moments_kernel), type, stream);
}

void launch(const MergeArguments& arguments, cudaStream_t stream) {
  const int64_t blocks = (arguments.channels * kLanes + kPlaneThreads - 1) / kPlaneThreads;
  merge_kernel<<<static_cast<unsigned>(blocks), kPlaneThreads, 0, stream>>>(arguments);
}

void launch(const ForwardArguments& arguments, ValueType type, cudaStream_t stream) {
  launch<ForwardArguments>(arguments, SYNCBN_BY_TYPE(forward_kernel), type, stream);
}

void launch(const ReduceArguments& arguments, ValueType type, cudaStream_t stream) {
  launch<ReduceArguments>(arguments, SYNCBN_BY_TYPE(reduce_kernel), type, stream);
}

void launch(const ElementwiseArguments& arguments, ValueType type, cudaStream_t stream) {
  launch<ElementwiseArguments>(arguments, SYNCBN_BY_TYPE(elementwise_kernel), type, stream);
}

#undef SYNCBN_BY_TYPE

}  // namespace syncbn::dist::detail::cuda
