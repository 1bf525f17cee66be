#pragma once

#include "cuda/peer_gather.cuh"
#include "cuda/walk.cuh"

// Merges statistics and sums of threads, blocks and ranks, always in the same order, so that equal
// inputs give equal bits.

namespace syncbn::dist::detail::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

/// The sum over the kLanes lanes of a group, with equal bits in each. All lanes of a warp call it.
__device__ __forceinline__ double sum_lanes(double value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

/// A sum and its rounding error: `error` is the exact sum less `value`.
template <class A>
struct Compensated {
  A value, error;
};
/// Knuth's TwoSum (The Art of Computer Programming 2, 4.2.2). double needs no compensation.
__device__ __forceinline__ Compensated<float> sum_of(float a, float b) {
  const float sum = a + b;
  const float of_b = sum - a;
  return {sum, (a - (sum - of_b)) + (b - of_b)};
}
__device__ __forceinline__ Compensated<double> sum_of(double a, double b) {
  return {a + b, 0};
}

// Threads compute in A, float for all types but double: many GPUs have 64 float units for each
// double unit. Parts of warps, blocks and ranks are merged in double.
//
// There are two kinds of parts. A thread's part of a channel (ThreadMoments, ThreadSums) has
// merge(), which merges two parts; shuffle(), which returns the part of the lane whose number
// differs in the bit `step`; and in_double(). A warp's part (Moments, ChannelSums) has merge_all(),
// by which a group of lanes merges read(0) to read(count - 1).

__device__ __forceinline__ Compensated<float> shuffle(const Compensated<float>& own, int step) {
  return {__shfl_xor_sync(kAllLanes, own.value, step), __shfl_xor_sync(kAllLanes, own.error, step)};
}
__device__ __forceinline__ Compensated<double> shuffle(const Compensated<double>& own, int step) {
  return {__shfl_xor_sync(kAllLanes, own.value, step), 0};
}

template <class A>
struct ThreadMoments {
  Compensated<A> mean;
  A m2, count;
};

template <class A>
__device__ __forceinline__ ThreadMoments<A> shuffle(const ThreadMoments<A>& own, int step) {
  return {shuffle(own.mean, step), __shfl_xor_sync(kAllLanes, own.m2, step),
          __shfl_xor_sync(kAllLanes, own.count, step)};
}

/// Chan, Golub and LeVeque (1979).
/// @param share b's count / the count of both
template <class A>
__device__ __forceinline__ ThreadMoments<A> merge(const ThreadMoments<A>& a,
                                                  const ThreadMoments<A>& b, A share) {
  const A delta = (b.mean.value - a.mean.value) + (b.mean.error - a.mean.error);
  return {sum_of(a.mean.value, a.mean.error + delta * share),
          a.m2 + b.m2 + delta * delta * a.count * share, a.count + b.count};
}
template <class A>
__device__ __forceinline__ ThreadMoments<A> merge(const ThreadMoments<A>& a,
                                                  const ThreadMoments<A>& b) {
  if (a.count == 0) return b;
  return b.count == 0 ? a : merge(a, b, b.count / (a.count + b.count));
}

template <class A>
__device__ __forceinline__ Moments in_double(const ThreadMoments<A>& part) {
  return {static_cast<double>(part.mean.value) + static_cast<double>(part.mean.error),
          static_cast<double>(part.m2), static_cast<double>(part.count)};
}

/// Skips parts of count 0, which may hold NaN. Returns a single part unchanged.
template <class Read>
__device__ __forceinline__ Moments merge_all(const Moments&, int64_t count, Read read) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  Moments all{0, 0, 0};
  for (int64_t i = lane; i < count; i += kLanes) all.count += read(i).count;
  all.count = sum_lanes(all.count);
  for (int64_t i = lane; i < count; i += kLanes) {
    const Moments part = read(i);
    if (part.count != 0) all.mean += part.mean * (part.count / all.count);
  }
  all.mean = sum_lanes(all.mean);
  for (int64_t i = lane; i < count; i += kLanes) {
    const Moments part = read(i);
    const double delta = part.mean - all.mean;
    if (part.count != 0) all.m2 += part.m2 + part.count * delta * delta;
  }
  all.m2 = sum_lanes(all.m2);
  return all;
}

template <class A>
__device__ __forceinline__ Compensated<A> add(const Compensated<A>& a, const Compensated<A>& b) {
  const Compensated<A> sum = sum_of(a.value, b.value);
  return {sum.value, sum.error + (a.error + b.error)};
}

template <class A>
struct ThreadSums {
  Compensated<A> dy, dy_xmu;
};

template <class A>
__device__ __forceinline__ ThreadSums<A> shuffle(const ThreadSums<A>& own, int step) {
  return {shuffle(own.dy, step), shuffle(own.dy_xmu, step)};
}

template <class A>
__device__ __forceinline__ ThreadSums<A> merge(const ThreadSums<A>& a, const ThreadSums<A>& b) {
  return {add(a.dy, b.dy), add(a.dy_xmu, b.dy_xmu)};
}

template <class A>
__device__ __forceinline__ ChannelSums in_double(const ThreadSums<A>& part) {
  const auto sum = [](const Compensated<A>& one) {
    return static_cast<double>(one.value) + static_cast<double>(one.error);
  };
  return {sum(part.dy), sum(part.dy_xmu)};
}

template <class Read>
__device__ __forceinline__ ChannelSums merge_all(const ChannelSums&, int64_t count, Read read) {
  ChannelSums all{0, 0};
  for (int64_t i = static_cast<int>(threadIdx.x) % kLanes; i < count; i += kLanes) {
    const ChannelSums part = read(i);
    all.dy += part.dy;
    all.dy_xmu += part.dy_xmu;
  }
  return {sum_lanes(all.dy), sum_lanes(all.dy_xmu)};
}

/// The channel of a group of lanes: each group of a block has one channel of the tile; groups
/// beyond the tile's channels have none.
struct ChannelOfGroup {
  int group;
  int64_t channel;
  bool exists;
};

template <bool kRows>
__device__ __forceinline__ ChannelOfGroup channel_of_group(const LaunchShape& shape,
                                                           const Position& at) {
  const int width = kRows ? shape.columns * kPack : 1;
  const int group = at.thread / kLanes;
  const int64_t channel = at.tile * width + group;
  return {group, channel, group < width && channel < shape.layout.c};
}

__device__ __forceinline__ bool is_first_lane() {
  return threadIdx.x % kLanes == 0;
}

/// Whether this block is the last of `blocks` blocks to call it with the ticket. The last block
/// then sees what the others have written. Leaves the ticket 0.
__device__ __forceinline__ bool is_last_block(unsigned* ticket, int blocks, bool& shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned last = static_cast<unsigned>(blocks) - 1;
    shared = atomicInc(ticket, last) == last;
  }
  __syncthreads();
  __threadfence();
  return shared;
}

template <bool kRows>
inline constexpr int kThreads = kRows ? kRowThreads : kPlaneThreads;
/// Channels of a thread.
template <bool kRows>
inline constexpr int kChannels = kRows ? kPack : 1;
/// Upper bound on the channels of a tile.
template <bool kRows>
inline constexpr int kTile = kRows ? kPack* kMaxColumns : 1;

template <class Part, bool kRows>
struct ReductionShared {
  Part parts[kThreads<kRows> / kWarp][kTile<kRows>];
  bool is_last;
  PeerGatherShared peers;
};

/// Merges all threads' parts of the channels of a tile. In the tile's last block, one lane per
/// channel calls finish(channel, part), which writes the launch's row. The block that finishes the
/// last tile gathers the rows of all ranks: it alone waits for other GPUs. The other blocks have
/// ended and leave their multiprocessors to kernels of other streams.
template <bool kRows, class ThreadPart, class Part, class Finish>
__device__ __forceinline__ void reduce_tiles(const LaunchShape& shape, const Position& at,
                                             ThreadPart (&own)[kChannels<kRows>], Part* partials,
                                             ReductionShared<Part, kRows>& shared,
                                             const PeerGatherArguments& peers, Finish finish) {
  for (int step = shape.columns; step < kWarp; step *= 2) {
#pragma unroll
    for (ThreadPart& part : own) part = merge(part, shuffle(part, step));
  }
  const int lane = at.thread % kWarp;
  if (lane < shape.columns) {
#pragma unroll
    for (int i = 0; i < kChannels<kRows>; ++i) {
      shared.parts[at.thread / kWarp][lane * kChannels<kRows> + i] = in_double(own[i]);
    }
  }
  __syncthreads();
  const ChannelOfGroup of = channel_of_group<kRows>(shape, at);
  Part all = merge_all(Part{}, of.exists ? kThreads<kRows> / kWarp : 0,
                       [&](int64_t warp) { return shared.parts[warp][of.group]; });
  if (shape.slices > 1) {
    const int64_t channels = shape.layout.c;
    if (of.exists && is_first_lane()) partials[at.slice * channels + of.channel] = all;
    if (!is_last_block(shape.tickets + 1 + at.tile, shape.slices, shared.is_last)) return;
    all = merge_all(Part{}, of.exists ? shape.slices : 0,
                    [&](int64_t slice) { return partials[slice * channels + of.channel]; });
  }
  if (of.exists && is_first_lane()) finish(of.channel, all);
  if (peers.ranks == 0) return;
  if (!is_last_block(shape.tickets, static_cast<int>(gridDim.x), shared.is_last)) return;
  gather_from_peers(peers, shared.peers);
}

}  // namespace syncbn::dist::detail::cuda
