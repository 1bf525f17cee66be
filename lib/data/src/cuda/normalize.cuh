#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/normalize_arguments.h"

// For a host compiler, the emulator defines CUDA's keywords.
#ifndef __CUDACC__
#include "cuda_emulator/device.h"
#endif

namespace syncbn::data::cuda {

struct alignas(kPack) Bytes {
  uint8_t values[kPack];
};

template <class T>
struct alignas(16) ImagePack {
  T values[kPack];
};

/// The position of an output value in its image.
template <bool kChannelsLast>
class Place {
 public:
  __device__ Place(const NormalizeArguments& arguments, int offset)
      : channels_(arguments.channels), pixels_(arguments.height * arguments.width) {
    const int inner = kChannelsLast ? channels_ : pixels_;
    (kChannelsLast ? channel_ : pixel_) = offset % inner;
    (kChannelsLast ? pixel_ : channel_) = offset / inner;
  }
  __device__ int channel() const { return channel_; }
  __device__ int pixel() const { return pixel_; }
  __device__ int offset(bool channels_last) const {
    return channels_last ? pixel_ * channels_ + channel_ : channel_ * pixels_ + pixel_;
  }
  /// Moves to the next value in memory.
  __device__ void advance() {
    int& inner = kChannelsLast ? channel_ : pixel_;
    if (++inner < (kChannelsLast ? channels_ : pixels_)) return;
    inner = 0;
    ++(kChannelsLast ? pixel_ : channel_);
  }

 private:
  int channels_, pixels_, channel_, pixel_;
};

__device__ inline bool is_inside(const NormalizeArguments& arguments, int64_t sample, int pixel) {
  if (arguments.sizes == nullptr) return true;
  const int64_t* const size = arguments.sizes + 2 * sample;
  return pixel / arguments.width < size[0] && pixel % arguments.width < size[1];
}

/// Each block handles one part of the values, in every gridDim.y-th image.
template <class T, bool kChannelsLast>
__device__ void normalize_images(const NormalizeArguments& arguments) {
  const int values = arguments.values();
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  if (first >= values) return;
  const Place<kChannelsLast> begin(arguments, static_cast<int>(first));
  const int count = values - first < kPack ? static_cast<int>(values - first) : kPack;
  const bool keeps_layout = arguments.from_channels_last == kChannelsLast;
  for (int64_t sample = blockIdx.y; sample < arguments.samples; sample += gridDim.y) {
    const uint8_t* const image = arguments.images + sample * values;
    Bytes bytes = {};
    if (keeps_layout && arguments.aligned) {
      bytes = *reinterpret_cast<const Bytes*>(image + first);
    } else {
      Place<kChannelsLast> place = begin;
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (i >= count) continue;
        bytes.values[i] = image[place.offset(arguments.from_channels_last)];
        place.advance();
      }
    }
    ImagePack<T> pack;
    Place<kChannelsLast> place = begin;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i >= count) continue;
      const int channel = place.channel();
      const float value =
          (static_cast<float>(bytes.values[i]) - arguments.mean[channel]) / arguments.std[channel];
      pack.values[i] = static_cast<T>(is_inside(arguments, sample, place.pixel()) ? value : 0.0F);
      place.advance();
    }
    T* const output = static_cast<T*>(arguments.output) + sample * values + first;
    if (arguments.aligned) {
      *reinterpret_cast<ImagePack<T>*>(output) = pack;
      continue;
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (i < count) output[i] = pack.values[i];
    }
  }
}

}  // namespace syncbn::data::cuda
