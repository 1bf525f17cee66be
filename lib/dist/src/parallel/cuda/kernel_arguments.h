#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "cuda/peer_gather_arguments.h"

// The arguments of the CUDA kernels of batch norm, and the shape of their launches. Plain C++, for
// the host's compiler as well.

namespace syncbn::dist::detail::cuda {

/// Consecutive values that a thread loads, computes and stores at once: a byte of the ReLU mask.
inline constexpr int kPack = 8;
/// Neighbouring threads that merge the statistics of one channel.
inline constexpr int kLanes = 8;
inline constexpr int kWarp = 32;
/// Upper bound on the neighbouring packs of a row in a block.
inline constexpr int kMaxColumns = 8;
/// Threads of a block: for rows, as many as merge the channels of a tile; for planes, a guess.
inline constexpr int kRowThreads = kMaxColumns * kPack * kLanes;
inline constexpr int kPlaneThreads = 256;

inline constexpr int64_t packs_of(int64_t values) {
  return (values + kPack - 1) / kPack;
}

/// How the values of a tensor [N, C, ...] lie in memory: rows of all channels (channels-last, or
/// two dimensions), or planes of one channel. A block processes one slice of the packs of one tile.
/// A tile has the channels of up to 8 neighbouring packs of a row, or the channel of a plane.
struct Layout {
  bool rows = false;
  int64_t n = 0, c = 0,
          s = 1;  ///< rows: n rows of c values, s is 1; planes: n * c planes of s values
  /// Every pack is full and starts at a multiple of 16 bytes, in each tensor of the launch.
  bool aligned = false;

  int columns() const {
    if (!rows) return 1;
    int columns = 1;
    while (columns < kMaxColumns && columns < packs_of(c)) columns *= 2;
    return columns;
  }
  int threads() const { return rows ? kRowThreads : kPlaneThreads; }
  int64_t tiles() const { return rows ? (packs_of(c) + columns() - 1) / columns() : c; }
  /// Number of blocks that share a tile: each thread gets several packs, and all tiles together get
  /// at most about `blocks` blocks.
  int slices(int64_t blocks) const {
    constexpr int64_t kPacksOfThread = 8;
    const int64_t packs = rows ? n * columns() : n * packs_of(s);
    const int64_t per_block = threads() * kPacksOfThread;
    const int64_t filled = (packs + per_block - 1) / per_block;
    return static_cast<int>(
        std::max<int64_t>(1, std::min(filled, blocks / std::max<int64_t>(1, tiles()))));
  }
};

/// Layout::aligned for tensors at these addresses, of elements of at least 2 bytes.
inline bool packs_are_aligned(const Layout& layout, std::initializer_list<const void*> tensors) {
  bool aligned = (layout.rows ? layout.c : layout.s) % kPack == 0;
  for (const void* const tensor : tensors) {
    aligned = aligned && reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
  }
  return aligned;
}

enum class ValueType : int { kFloat, kDouble, kHalf, kBFloat16, kInt, kLong };

/// One value per channel, of any type; data is null if the layer has none.
struct ChannelValues {
  void* data = nullptr;
  ValueType type = ValueType::kFloat;
  int64_t stride = 1;
};

/// Sizes and workspace of a launch. Workspaces belong to one stream.
struct LaunchShape {
  Layout layout = {};
  int columns = 1;  ///< layout.columns()
  int slices = 1;
  /// One ticket for the whole launch, then one per tile if there are several slices. All are 0
  /// before and after a launch.
  unsigned* tickets = nullptr;
};

/// Statistics of one channel over `count` values.
struct Moments {
  double mean, m2, count;
};

struct MomentsArguments {
  LaunchShape shape = {};
  const void* input = nullptr;
  double* row = nullptr;           ///< [2C + 1] result, as BatchNormKernels::moments() returns it
  Moments* partials = nullptr;     ///< [slices, C]; null for one slice
  PeerGatherArguments peers = {};  ///< to gather the row; 0 ranks: the kernel does not gather
};

struct MergeArguments {
  int64_t channels = 0;
  const double* rows = nullptr;  ///< [ranks, row_stride], each begins with [2C + 1] moments
  int64_t ranks = 0, row_stride = 0;
  double* merged = nullptr;  ///< [2C + 1] result
};

struct ForwardArguments {
  LaunchShape shape = {};
  MergeArguments merge = {};
  const void* input = nullptr;
  const void* residual = nullptr;  ///< null: none
  void* output = nullptr;
  uint8_t* relu_mask = nullptr;  ///< null: no ReLU
  double* invstd = nullptr;      ///< [C] result
  ChannelValues weight = {}, bias = {};
  double eps = 0;
  ChannelValues running_mean = {}, running_var = {};
  ChannelValues num_batches_tracked = {};  ///< one value; null: no counter
  double momentum = 0;
  bool cumulative = false;  ///< the momentum is 1 / num_batches_tracked
};

/// Sums of one channel over the gradient dy of the output.
struct ChannelSums {
  double dy, dy_xmu;  ///< dy_xmu: of dy * (x - mean)
};

struct ReduceArguments {
  LaunchShape shape = {};
  const void* gradient = nullptr;
  const uint8_t* relu_mask = nullptr;  ///< null: no ReLU
  const void* input = nullptr;
  const double* moments = nullptr;  ///< [2C + 1] over all ranks
  const double* invstd = nullptr;
  const double* before = nullptr;   ///< [2C] added to the sums; may be null
  double* sums = nullptr;           ///< [2C] result
  ChannelSums* partials = nullptr;  ///< [slices, C]; null for one slice
  ChannelValues grad_weight = {}, grad_bias = {};
  PeerGatherArguments peers = {};  ///< as in MomentsArguments, for the sums
};

struct ElementwiseArguments {
  LaunchShape shape = {};
  const void* gradient = nullptr;
  const uint8_t* relu_mask = nullptr;  ///< null: no ReLU
  const void* input = nullptr;
  void* grad_input = nullptr;
  void* masked_gradient = nullptr;  ///< result; null: not wanted
  const double* moments = nullptr;
  const double* invstd = nullptr;
  const double* sums = nullptr;  ///< [ranks, 2C]
  int64_t ranks = 1;
  ChannelValues weight = {};
};

}  // namespace syncbn::dist::detail::cuda
