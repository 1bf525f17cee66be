#include "cuda_emulator/batch_norm_kernels.h"

#include <stdexcept>

#include "cuda/backward.cuh"
#include "cuda/forward.cuh"

namespace syncbn::dist::detail::cuda {
namespace {

/// Launches a kernel with the grid and block of batch_norm_launch.cu.
template <class Shared, class Kernel>
void run(const LaunchShape& shape, const Schedule& schedule, Kernel kernel) {
  const Layout& layout = shape.layout;
  const cuda_emulator::Launch launch{
      .grid = dim3(static_cast<unsigned>(layout.tiles()), static_cast<unsigned>(shape.slices)),
      .block = dim3(static_cast<unsigned>(layout.threads())),
      .seed = schedule.seed,
      .only = schedule.only};
  cuda_emulator::run<Shared>(launch, kernel);
}

/// Calls run.operator()<T, kRows>().
template <class T, class Run>
void with_layout(bool rows, Run run) {
  rows ? run.template operator()<T, true>() : run.template operator()<T, false>();
}
template <class Run>
void with_type(ValueType type, bool rows, Run run) {
  switch (type) {
    case ValueType::kFloat:
      return with_layout<float>(rows, run);
    case ValueType::kDouble:
      return with_layout<double>(rows, run);
    case ValueType::kHalf:
      return with_layout<__half>(rows, run);
    case ValueType::kBFloat16:
      return with_layout<__nv_bfloat16>(rows, run);
    default:
      throw std::logic_error("no kernels for elements of this type");
  }
}

}  // namespace

void emulate(const MomentsArguments& arguments, ValueType type, const Schedule& schedule) {
  with_type(type, arguments.shape.layout.rows, [&]<class T, bool kRows>() {
    using Shared = ReductionShared<Moments, kRows>;
    run<Shared>(arguments.shape, schedule,
                [&](Shared& shared) { compute_moments<T, kRows>(arguments, shared); });
  });
}

void emulate(const MergeArguments& arguments, const Schedule& schedule) {
  const int64_t blocks = (arguments.channels * kLanes + kPlaneThreads - 1) / kPlaneThreads;
  cuda_emulator::run({.grid = dim3(static_cast<unsigned>(blocks)),
                      .block = dim3(kPlaneThreads),
                      .seed = schedule.seed},
                     0, [&](void*) { merge_moments(arguments); });
}

void emulate(const ForwardArguments& arguments, ValueType type, const Schedule& schedule) {
  with_type(type, arguments.shape.layout.rows, [&]<class T, bool kRows>() {
    using Shared = ForwardShared<Wide<T>, kRows>;
    run<Shared>(arguments.shape, schedule,
                [&](Shared& shared) { normalize<T, kRows>(arguments, shared); });
  });
}

void emulate(const ReduceArguments& arguments, ValueType type, const Schedule& schedule) {
  with_type(type, arguments.shape.layout.rows, [&]<class T, bool kRows>() {
    using Shared = ReductionShared<ChannelSums, kRows>;
    run<Shared>(arguments.shape, schedule,
                [&](Shared& shared) { reduce_gradient<T, kRows>(arguments, shared); });
  });
}

void emulate(const ElementwiseArguments& arguments, ValueType type, const Schedule& schedule) {
  with_type(type, arguments.shape.layout.rows, [&]<class T, bool kRows>() {
    using Shared = BackwardShared<Wide<T>, kRows>;
    run<Shared>(arguments.shape, schedule,
                [&](Shared& shared) { differentiate_input<T, kRows>(arguments, shared); });
  });
}

}  // namespace syncbn::dist::detail::cuda
