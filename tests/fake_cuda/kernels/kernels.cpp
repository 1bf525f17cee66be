// Stand-ins for the project's own kernels: the emulator runs their sources.
#include <atomic>
#include <stdexcept>
#include <string>

#include "cuda_emulator/batch_norm_kernels.h"
#include "cuda_emulator/normalize_kernel.h"
#include "cuda_emulator/peer_gather_kernel.h"
#include "fake_cuda.h"

namespace fake_cuda {
namespace {

using namespace syncbn::dist::detail::cuda;
namespace data = syncbn::data;

/// A new order of blocks and warps for each launch.
Schedule next_schedule() {
  static std::atomic<uint64_t> launches = 0;
  return {.seed = ++launches};
}

template <class Arguments, ValueType kType, bool kRows>
void run_kernel(dim3 grid, dim3 block, size_t /*shared_bytes*/, Arguments arguments) {
  const Layout& layout = arguments.shape.layout;
  if (layout.rows != kRows) {
    throw std::logic_error("a kernel of batch norm was launched for the other layout");
  }
  if (grid.x != layout.tiles() || grid.y != static_cast<unsigned>(arguments.shape.slices) ||
      block.x != static_cast<unsigned>(layout.threads())) {
    throw std::logic_error("a kernel of batch norm has another grid than its arguments say");
  }
  emulate(arguments, kType, next_schedule());
}

void merge(dim3 /*grid*/, dim3 /*block*/, size_t /*shared_bytes*/, MergeArguments arguments) {
  emulate(arguments, next_schedule());
}

/// Whether a kernel waits for other ranks.
template <class Arguments>
bool gathers(const Arguments& arguments) {
  if constexpr (requires { arguments.peers; }) return arguments.peers.ranks > 0;
  return false;
}

/// @param name a kernel template of batch_norm_launch.cu; the mangled name continues with type and
///   layout
template <class Arguments, bool kRows>
void define_for_layout(const std::string& name) {
  const std::string rows = kRows ? "Lb1E" : "Lb0E";
  const auto define = [&](const char* type, auto run) {
    define_kernel(name + type + rows, run, gathers<Arguments>);
  };
  define("If", run_kernel<Arguments, ValueType::kFloat, kRows>);
  define("Id", run_kernel<Arguments, ValueType::kDouble, kRows>);
  define("I6__half", run_kernel<Arguments, ValueType::kHalf, kRows>);
  define("I13__nv_bfloat16", run_kernel<Arguments, ValueType::kBFloat16, kRows>);
}

template <class Arguments>
void define_for_types(const std::string& name) {
  define_for_layout<Arguments, false>(name);
  define_for_layout<Arguments, true>(name);
}

template <data::cuda::ImageType kType>
void normalize(dim3 grid, dim3 block, size_t /*shared_bytes*/,
               data::cuda::NormalizeArguments arguments) {
  if (grid.x != arguments.blocks() || grid.y != arguments.rows() ||
      block.x != data::cuda::kThreads) {
    throw std::logic_error("the kernel for images has another grid than its arguments say");
  }
  data::cuda::emulate(arguments, kType, next_schedule().seed);
}

void gather_from_peers(dim3 grid, dim3 block, size_t /*shared_bytes*/,
                       PeerGatherArguments arguments) {
  if (grid.x != 1 || block.x != kPeerThreads) {
    throw std::logic_error("the kernel that gathers from peers is one block");
  }
  emulate(arguments, next_schedule().seed);
}

const bool are_defined = [] {
  define_for_types<MomentsArguments>("moments_kernel");
  define_kernel("merge_kernel", merge);
  define_for_types<ForwardArguments>("forward_kernel");
  define_for_types<ReduceArguments>("reduce_kernel");
  define_for_types<ElementwiseArguments>("elementwise_kernel");
  define_kernel(
      "peer_gather_kernel", gather_from_peers, +[](const PeerGatherArguments&) { return true; });
  define_kernel("normalize_kernelIf", normalize<data::cuda::ImageType::kFloat>);
  define_kernel("normalize_kernelI6__half", normalize<data::cuda::ImageType::kHalf>);
  define_kernel("normalize_kernelI13__nv_bfloat16", normalize<data::cuda::ImageType::kBFloat16>);
  return true;
}();

}  // namespace
}  // namespace fake_cuda
