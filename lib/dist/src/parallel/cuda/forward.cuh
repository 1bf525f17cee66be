#pragma once

#include "cuda/reduction.cuh"

namespace syncbn::dist::detail::cuda {

/// Welford's running mean and sum of squared deviations, in chunks: the sums of a chunk are of
/// deviations from the mean so far.
template <class A>
class ChunkedWelford {
 public:
  __device__ void start(A shift) { mean_.value = shift; }
  __device__ void add(A value) {
    const A deviation = value - mean_.value;
    sum_ += deviation;
    squares_ += deviation * deviation;
  }
  /// Ends a chunk of `count` values, which `before` values preceded.
  /// @param inverse 1 / count
  /// @param share count / (before + count)
  __device__ void merge_chunk(A before, A count, A inverse, A share) {
    const A chunk_mean = sum_ * inverse;
    const A m2 = squares_ - sum_ * chunk_mean;
    // Rounding can make the chunk's m2 slightly negative. Keeps NaN.
    const ThreadMoments<A> chunk{sum_of(mean_.value, chunk_mean), m2 < 0 ? A(0) : m2, count};
    const ThreadMoments<A> merged = merge(moments(before), chunk, share);
    mean_ = merged.mean;
    m2_ = merged.m2;
    sum_ = squares_ = 0;
  }
  __device__ ThreadMoments<A> moments(A count) const { return {mean_, m2_, count}; }

 private:
  Compensated<A> mean_ = {0, 0};
  A m2_ = 0, sum_ = 0, squares_ = 0;
};

/// Computes the row of this rank's statistics.
template <class T, bool kRows>
__device__ __forceinline__ void compute_moments(const MomentsArguments& arguments,
                                                ReductionShared<Moments, kRows>& shared) {
  constexpr int kBatch = kPacksInFlight<T>;
  // 32 values per chunk: float's rounding of their sum is small, and merging costs little per
  // value.
  constexpr int kBatchesOfChunk = (kRows ? 32 : 4) / kBatch;
  const LaunchShape& shape = arguments.shape;
  const Position at = position();
  using A = Wide<T>;
  ChunkedWelford<A> own[kChannels<kRows>];
  A before = 0;
  int in_chunk = 0;
  const auto merge_chunk = [&] {
    const A count = static_cast<A>(in_chunk);
    const A inverse = 1 / count, share = count / (before + count);
#pragma unroll
    for (auto& channel : own) channel.merge_chunk(before, count, inverse, share);
    before += count;
    in_chunk = 0;
  };
  Walk<kRows> walk(shape, at);
  bool started = false;
  for (int batches = 1; walk.left() > 0; ++batches) {
    Pack<T> packs[kBatch];
    Place places[kBatch];
    const int count = load_batch(walk, packs, places, [&](const Place& place) {
      return load_pack<T>(arguments.input, place, shape.layout.aligned);
    });
    if (!started) {
#pragma unroll
      for (int i = 0; i < kChannels<kRows>; ++i) own[i].start(widen(packs[0].values[i]));
      started = true;
    }
#pragma unroll
    for (int pack = 0; pack < kBatch; ++pack) {
      if (pack >= count) continue;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (kRows || i < places[pack].valid) own[kRows ? i : 0].add(widen(packs[pack].values[i]));
      }
      in_chunk += kRows ? 1 : places[pack].valid;
    }
    if (batches % kBatchesOfChunk == 0) merge_chunk();
  }
  if (in_chunk > 0) merge_chunk();

  ThreadMoments<A> parts[kChannels<kRows>];
#pragma unroll
  for (int i = 0; i < kChannels<kRows>; ++i) parts[i] = own[i].moments(before);
  reduce_tiles<kRows>(shape, at, parts, arguments.partials, shared, arguments.peers,
                      [&](int64_t channel, const Moments& all) {
                        double* const row = arguments.row;
                        const int64_t channels = shape.layout.c;
                        row[channel] = all.mean;
                        row[channels + channel] = all.m2;
                        if (channel == 0) row[2 * channels] = all.count;
                      });
}

/// The moments of a channel over all rows. All lanes of a warp call it.
__device__ __forceinline__ Moments merge_rows(const MergeArguments& arguments, int64_t channel,
                                              bool exists) {
  return merge_all(Moments{}, exists ? arguments.ranks : 0, [&](int64_t rank) {
    const double* const row = arguments.rows + rank * arguments.row_stride;
    return Moments{row[channel], row[arguments.channels + channel], row[2 * arguments.channels]};
  });
}

__device__ __forceinline__ void store_merged(const MergeArguments& arguments, int64_t channel,
                                             const Moments& merged) {
  arguments.merged[channel] = merged.mean;
  arguments.merged[arguments.channels + channel] = merged.m2;
  if (channel == 0) arguments.merged[2 * arguments.channels] = merged.count;
}

/// One group of lanes per channel.
__device__ __forceinline__ void merge_moments(const MergeArguments& arguments) {
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const bool exists = channel < arguments.channels;
  const Moments merged = merge_rows(arguments, channel, exists);
  if (exists && is_first_lane()) store_merged(arguments, channel, merged);
}

__device__ __forceinline__ void update_running(const ForwardArguments& arguments, int64_t channel,
                                               const Moments& merged) {
  const double batches = load(arguments.num_batches_tracked, 0, 0) + 1;
  const double momentum = arguments.cumulative ? 1 / batches : arguments.momentum;
  const auto blend = [&](const ChannelValues& running, double value) {
    const double before = load(running, channel, 0);
    store(running, channel, (1 - momentum) * before + momentum * value);
  };
  blend(arguments.running_mean, merged.mean);
  blend(arguments.running_var, merged.m2 / (merged.count - 1));
}

/// y = (x - center) * scale + shift
template <class A, bool kRows>
struct ForwardShared {
  A center[kTile<kRows>], scale[kTile<kRows>], shift[kTile<kRows>];
  bool is_last;
};

/// Merges the rows of all ranks, updates the running statistics, normalises, adds the residual and
/// applies the ReLU. The blocks of slice 0 write the results per channel.
template <class T, bool kRows>
__device__ __forceinline__ void normalize(const ForwardArguments& arguments,
                                          ForwardShared<Wide<T>, kRows>& shared) {
  using A = Wide<T>;
  constexpr int kBatch = kPacksInFlight < T >> 1 ? 2 : 1;
  const LaunchShape& shape = arguments.shape;
  const Position at = position();
  const ChannelOfGroup of = channel_of_group<kRows>(shape, at);
  const Moments merged = merge_rows(arguments.merge, of.channel, of.exists);
  const double count = merged.count > 1 ? merged.count : 1;  // not NaN if all ranks are empty
  const double invstd = 1 / sqrt(merged.m2 / count + arguments.eps);
  const bool updates = of.exists && merged.count > 1;
  if (of.exists && is_first_lane()) {
    const double scale = invstd * load(arguments.weight, of.channel, 1);
    const A center = static_cast<A>(merged.mean);
    shared.center[of.group] = center;
    shared.scale[of.group] = static_cast<A>(scale);
    // Compensates for the rounding of the mean.
    shared.shift[of.group] = static_cast<A>(load(arguments.bias, of.channel, 0) -
                                            (merged.mean - static_cast<double>(center)) * scale);
    if (at.slice == 0) {
      store_merged(arguments.merge, of.channel, merged);
      arguments.invstd[of.channel] = invstd;
      if (updates) update_running(arguments, of.channel, merged);
    }
  }
  // The last block changes the counter, after all others have read it. Thread 0 has a channel in
  // every block.
  if (at.slice == 0 && arguments.num_batches_tracked.data != nullptr &&
      is_last_block(shape.tickets, static_cast<int>(gridDim.x), shared.is_last) &&
      threadIdx.x == 0 && updates) {
    store(arguments.num_batches_tracked, 0, load(arguments.num_batches_tracked, 0, 0) + 1);
  }
  __syncthreads();

  const int first = kRows ? at.thread % shape.columns * kPack : 0;
  A center[kChannels<kRows>], scale[kChannels<kRows>], shift[kChannels<kRows>];
#pragma unroll
  for (int i = 0; i < kChannels<kRows>; ++i) {
    center[i] = shared.center[first + i];
    scale[i] = shared.scale[first + i];
    shift[i] = shared.shift[first + i];
  }
  struct Loaded {
    Pack<T> x, residual;
  };
  Walk<kRows> walk(shape, at);
  while (walk.left() > 0) {
    Loaded loaded[kBatch];
    Place places[kBatch];
    const bool aligned = shape.layout.aligned;
    const int batch = load_batch(walk, loaded, places, [&](const Place& place) {
      Loaded one;
      one.x = load_pack<T>(arguments.input, place, aligned);
      if (arguments.residual != nullptr) {
        one.residual = load_pack<T>(arguments.residual, place, aligned);
      }
      return one;
    });
#pragma unroll
    for (int pack = 0; pack < kBatch; ++pack) {
      if (pack >= batch) continue;
      Pack<T> output;
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const int of_channel = kRows ? i : 0;
        A value = (widen(loaded[pack].x.values[i]) - center[of_channel]) * scale[of_channel] +
                  shift[of_channel];
        if (arguments.residual != nullptr) value += widen(loaded[pack].residual.values[i]);
        if (arguments.relu_mask != nullptr) {
          // NaN stays and lets the gradient pass, as in at::relu and at::threshold_backward.
          if (!(value <= 0)) bits |= 1u << i;
          if (value < 0) value = 0;
        }
        output.values[i] = narrow<T>(value);
      }
      store_pack(arguments.output, places[pack], aligned, output);
      if (arguments.relu_mask != nullptr) {
        const unsigned exist = 0xFFu >> (kPack - places[pack].valid);
        arguments.relu_mask[places[pack].mask] = static_cast<uint8_t>(bits & exist);
      }
    }
  }
}

}  // namespace syncbn::dist::detail::cuda
