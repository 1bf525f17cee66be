#pragma once

#include "cuda/reduction.cuh"

namespace syncbn::dist::detail::cuda {

/// dy and x of a pack, and the bits of the ReLU mask for dy.
template <class T>
struct GradientPack {
  Pack<T> dy, x;
  unsigned bits;
};

/// @param arguments of either kernel of the backward
template <class T, class Arguments>
__device__ __forceinline__ GradientPack<T> load_gradient(const Arguments& arguments,
                                                         const Place& place) {
  const bool aligned = arguments.shape.layout.aligned;
  return {load_pack<T>(arguments.gradient, place, aligned),
          load_pack<T>(arguments.input, place, aligned), load_bits(arguments.relu_mask, place)};
}

template <class T>
__device__ __forceinline__ Wide<T> masked(const GradientPack<T>& pack, int i) {
  return (pack.bits >> i & 1u) != 0 ? widen(pack.dy.values[i]) : Wide<T>(0);
}

/// A compensated sum of chunks. The sum of each chunk is not compensated.
template <class A>
class ChunkedSum {
 public:
  __device__ void add(A value) { chunk_ += value; }
  __device__ void merge_chunk() {
    total_ = cuda::add(total_, Compensated<A>{chunk_, 0});
    chunk_ = 0;
  }
  __device__ Compensated<A> total() const { return total_; }

 private:
  A chunk_ = 0;
  Compensated<A> total_ = {0, 0};
};
template <>
class ChunkedSum<double> {
 public:
  __device__ void add(double value) { total_ += value; }
  __device__ void merge_chunk() {}
  __device__ Compensated<double> total() const { return {total_, 0}; }

 private:
  double total_ = 0;
};

/// The sums of the masked gradient, and the gradients of weight and bias.
template <class T, bool kRows>
__device__ __forceinline__ void reduce_gradient(const ReduceArguments& arguments,
                                                ReductionShared<ChannelSums, kRows>& shared) {
  using A = Wide<T>;
  constexpr int kBatch = kPacksInFlight < T >> 1 ? 2 : 1;
  constexpr int kBatchesOfChunk = (kRows ? 32 : 4) / kBatch;  // 32 values, as for the moments
  const LaunchShape& shape = arguments.shape;
  const Position at = position();
  const int64_t channels = shape.layout.c;
  const int64_t first =
      kRows ? (at.tile * shape.columns + at.thread % shape.columns) * kPack : at.tile;
  A center[kChannels<kRows>];
  ChunkedSum<A> dy[kChannels<kRows>], dy_xmu[kChannels<kRows>];
#pragma unroll
  for (int i = 0; i < kChannels<kRows>; ++i) {
    center[i] = first + i < channels ? static_cast<A>(arguments.moments[first + i]) : A(0);
  }
  const auto merge_chunk = [&] {
#pragma unroll
    for (int i = 0; i < kChannels<kRows>; ++i) {
      dy[i].merge_chunk();
      dy_xmu[i].merge_chunk();
    }
  };
  Walk<kRows> walk(shape, at);
  for (int batches = 1; walk.left() > 0; ++batches) {
    GradientPack<T> packs[kBatch];
    Place places[kBatch];
    const int count = load_batch(walk, packs, places, [&](const Place& place) {
      return load_gradient<T>(arguments, place);
    });
#pragma unroll
    for (int pack = 0; pack < kBatch; ++pack) {
      if (pack >= count) continue;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const int of_channel = kRows ? i : 0;
        const A value = masked(packs[pack], i);
        dy[of_channel].add(value);
        dy_xmu[of_channel].add(value * (widen(packs[pack].x.values[i]) - center[of_channel]));
      }
    }
    if (batches % kBatchesOfChunk == 0) merge_chunk();
  }
  merge_chunk();

  ThreadSums<A> parts[kChannels<kRows>];
#pragma unroll
  for (int i = 0; i < kChannels<kRows>; ++i) parts[i] = {dy[i].total(), dy_xmu[i].total()};
  reduce_tiles<kRows>(shape, at, parts, arguments.partials, shared, arguments.peers,
                      [&](int64_t channel, ChannelSums all) {
                        const double mean = arguments.moments[channel];
                        // The deviations are from the rounded mean.
                        all.dy_xmu -= all.dy * (mean - static_cast<double>(static_cast<A>(mean)));
                        if (arguments.before != nullptr) {
                          all.dy += arguments.before[channel];
                          all.dy_xmu += arguments.before[channels + channel];
                        }
                        arguments.sums[channel] = all.dy;
                        arguments.sums[channels + channel] = all.dy_xmu;
                        store(arguments.grad_weight, channel,
                              all.dy_xmu * arguments.invstd[channel]);
                        store(arguments.grad_bias, channel, all.dy);
                      });
}

/// dx = (dy - offset) * scale + (x - center) * slope
template <class A, bool kRows>
struct BackwardShared {
  A center[kTile<kRows>], scale[kTile<kRows>], offset[kTile<kRows>], slope[kTile<kRows>];
};

/// The gradients of the input and of the residual.
template <class T, bool kRows>
__device__ __forceinline__ void differentiate_input(const ElementwiseArguments& arguments,
                                                    BackwardShared<Wide<T>, kRows>& shared) {
  using A = Wide<T>;
  constexpr int kBatch = kPacksInFlight < T >> 1 ? 2 : 1;
  const LaunchShape& shape = arguments.shape;
  const Position at = position();
  const int64_t channels = shape.layout.c;
  const ChannelOfGroup of = channel_of_group<kRows>(shape, at);
  if (of.exists && is_first_lane()) {
    // One lane adds them: merge_all() needs more registers than the float64 kernel has left.
    ChannelSums sums{0, 0};
    for (int64_t rank = 0; rank < arguments.ranks; ++rank) {
      const double* const row = arguments.sums + rank * 2 * channels;
      sums.dy += row[of.channel];
      sums.dy_xmu += row[channels + of.channel];
    }
    const double mean = arguments.moments[of.channel];
    const double count = arguments.moments[2 * channels];
    const double invstd = arguments.invstd[of.channel];
    const double scale = invstd * load(arguments.weight, of.channel, 1);
    const double ratio = -invstd * invstd * sums.dy_xmu / count;
    const double slope = ratio * scale;
    const A center = static_cast<A>(mean);
    // The second term compensates for the rounding of the mean.
    const double offset = sums.dy / count + (mean - static_cast<double>(center)) * ratio;
    shared.center[of.group] = center;
    shared.scale[of.group] = static_cast<A>(scale);
    shared.offset[of.group] = static_cast<A>(offset);
    shared.slope[of.group] = static_cast<A>(slope);
  }
  __syncthreads();

  const int first = kRows ? at.thread % shape.columns * kPack : 0;
  A center[kChannels<kRows>], scale[kChannels<kRows>], offset[kChannels<kRows>],
      slope[kChannels<kRows>];
#pragma unroll
  for (int i = 0; i < kChannels<kRows>; ++i) {
    center[i] = shared.center[first + i];
    scale[i] = shared.scale[first + i];
    offset[i] = shared.offset[first + i];
    slope[i] = shared.slope[first + i];
  }
  Walk<kRows> walk(shape, at);
  while (walk.left() > 0) {
    GradientPack<T> packs[kBatch];
    Place places[kBatch];
    const int batch = load_batch(walk, packs, places, [&](const Place& place) {
      return load_gradient<T>(arguments, place);
    });
#pragma unroll
    for (int pack = 0; pack < kBatch; ++pack) {
      if (pack >= batch) continue;
      Pack<T> grad_input, masked_gradient;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const int of_channel = kRows ? i : 0;
        const A dy = masked(packs[pack], i);
        const A deviation = widen(packs[pack].x.values[i]) - center[of_channel];
        grad_input.values[i] = narrow<T>((dy - offset[of_channel]) * scale[of_channel] +
                                         deviation * slope[of_channel]);
        masked_gradient.values[i] = narrow<T>(dy);
      }
      const bool aligned = shape.layout.aligned;
      store_pack(arguments.grad_input, places[pack], aligned, grad_input);
      if (arguments.masked_gradient != nullptr) {
        store_pack(arguments.masked_gradient, places[pack], aligned, masked_gradient);
      }
    }
  }
}

}  // namespace syncbn::dist::detail::cuda
