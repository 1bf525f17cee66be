#pragma once

#include "cuda/values.cuh"

namespace syncbn::dist::detail::cuda {

/// This thread's position in a launch.
struct Position {
  int64_t tile;
  int slice, thread;
};

__device__ inline Position position() {
  return {static_cast<int64_t>(blockIdx.x), static_cast<int>(blockIdx.y),
          static_cast<int>(threadIdx.x)};
}

/// Iterates over the packs of one thread: every (slices * threads)th pack of the tile. Indices have
/// 64 bits. Only the constructor divides.
template <bool kRows>
class Walk;

template <>
class Walk<true> {
 public:
  __device__ Walk(const LaunchShape& shape, const Position& at) {
    const Layout& layout = shape.layout;
    const int64_t packs = packs_of(layout.c);
    const int64_t column = at.tile * shape.columns + at.thread % shape.columns;
    const int rows = kRowThreads / shape.columns;
    const int64_t first = static_cast<int64_t>(at.slice) * rows + at.thread / shape.columns;
    const int64_t step = static_cast<int64_t>(shape.slices) * rows;
    const bool has_any = column < packs && first < layout.n;
    left_ = has_any ? (layout.n - first + step - 1) / step : 0;
    place_.offset = first * layout.c + column * kPack;
    place_.mask = first * packs + column;
    const int64_t remaining = layout.c - column * kPack;
    place_.valid = remaining < kPack ? static_cast<int>(remaining) : kPack;
    step_ = step * layout.c;
    mask_step_ = step * packs;
  }
  __device__ int64_t left() const { return left_; }
  __device__ Place next() {
    const Place place = place_;
    place_.offset += step_;
    place_.mask += mask_step_;
    --left_;
    return place;
  }

 private:
  Place place_;
  int64_t left_, step_, mask_step_;
};

template <>
class Walk<false> {
 public:
  __device__ Walk(const LaunchShape& shape, const Position& at)
      : channels_(shape.layout.c),
        channel_(at.tile),
        values_(shape.layout.s),
        packs_(packs_of(values_)) {
    const int64_t all = shape.layout.n * packs_;
    const int64_t first = static_cast<int64_t>(at.slice) * kPlaneThreads + at.thread;
    const int64_t step = static_cast<int64_t>(shape.slices) * kPlaneThreads;
    left_ = first < all ? (all - first + step - 1) / step : 0;
    if (left_ == 0) return;
    sample_ = first / packs_;
    pack_ = first % packs_;
    sample_step_ = step / packs_;
    pack_step_ = step % packs_;
  }
  __device__ int64_t left() const { return left_; }
  __device__ Place next() {
    const int64_t plane = sample_ * channels_ + channel_;
    const int64_t begin = pack_ * kPack;
    const int64_t remaining = values_ - begin;
    const Place place{plane * values_ + begin, plane * packs_ + pack_,
                      remaining < kPack ? static_cast<int>(remaining) : kPack};
    sample_ += sample_step_;
    pack_ += pack_step_;
    if (pack_ >= packs_) {
      pack_ -= packs_;
      ++sample_;
    }
    --left_;
    return place;
  }

 private:
  int64_t channels_, channel_, values_, packs_;
  int64_t left_, sample_ = 0, pack_ = 0, sample_step_ = 0, pack_step_ = 0;
};

/// Number of packs of one tensor that a thread loads before it uses the first. Registers limit it.
template <class T>
inline constexpr int kPacksInFlight = sizeof(T) == sizeof(double) ? 1 : 4;

/// Loads up to kBatch packs before the caller uses the first, so that several loads are in flight.
/// @return the number of packs loaded
template <int kBatch, bool kRows, class Loaded, class Load>
__device__ __forceinline__ int load_batch(Walk<kRows>& walk, Loaded (&loaded)[kBatch],
                                          Place (&places)[kBatch], Load load) {
  const int count = walk.left() < kBatch ? static_cast<int>(walk.left()) : kBatch;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (i >= count) continue;
    places[i] = walk.next();
    loaded[i] = load(places[i]);
  }
  return count;
}

}  // namespace syncbn::dist::detail::cuda
