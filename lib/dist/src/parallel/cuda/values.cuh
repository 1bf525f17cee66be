#pragma once

#include "cuda/device_language.h"
#include "cuda/kernel_arguments.h"

// Loads and stores packs of a tensor, and single values per channel of any type.

namespace syncbn::dist::detail::cuda {

__device__ inline float widen(float value) {
  return value;
}
__device__ inline double widen(double value) {
  return value;
}
__device__ inline float widen(__half value) {
  return __half2float(value);
}
__device__ inline float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

/// The type in which kernels compute with values of T.
template <class T>
using Wide = decltype(widen(T()));

template <class T>
__device__ inline T narrow(Wide<T> value) {
  return value;
}
template <>
__device__ inline __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <class T>
struct alignas(16) Pack {
  T values[kPack];
};

/// The place of a pack: offset of its first value, offset of its byte in the ReLU mask, and how
/// many of its values exist.
struct Place {
  int64_t offset, mask;
  int valid;
};

/// Loads a pack. Values that do not exist are 0.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const void* tensor, const Place& place, bool aligned) {
  const T* const from = static_cast<const T*>(tensor) + place.offset;
  if (aligned) return *reinterpret_cast<const Pack<T>*>(from);
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < kPack; ++i) pack.values[i] = i < place.valid ? from[i] : narrow<T>(0);
  return pack;
}

template <class T>
__device__ __forceinline__ void store_pack(void* tensor, const Place& place, bool aligned,
                                           const Pack<T>& pack) {
  T* const to = static_cast<T*>(tensor) + place.offset;
  if (aligned) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    if (i < place.valid) to[i] = pack.values[i];
  }
}

/// The bits of the ReLU mask for a pack; all set without a mask.
__device__ __forceinline__ unsigned load_bits(const uint8_t* mask, const Place& place) {
  return mask == nullptr ? 0xFFu : mask[place.mask];
}

/// @param otherwise the value if the layer has none
__device__ inline double load(const ChannelValues& values, int64_t channel, double otherwise) {
  if (values.data == nullptr) return otherwise;
  const int64_t i = channel * values.stride;
  switch (values.type) {
    case ValueType::kFloat:
      return static_cast<const float*>(values.data)[i];
    case ValueType::kDouble:
      return static_cast<const double*>(values.data)[i];
    case ValueType::kHalf:
      return widen(static_cast<const __half*>(values.data)[i]);
    case ValueType::kBFloat16:
      return widen(static_cast<const __nv_bfloat16*>(values.data)[i]);
    case ValueType::kInt:
      return static_cast<const int32_t*>(values.data)[i];
    case ValueType::kLong:
      return static_cast<double>(static_cast<const int64_t*>(values.data)[i]);
  }
  return otherwise;
}

__device__ inline void store(const ChannelValues& values, int64_t channel, double value) {
  if (values.data == nullptr) return;
  const int64_t i = channel * values.stride;
  const float single = static_cast<float>(value);
  switch (values.type) {
    case ValueType::kFloat:
      static_cast<float*>(values.data)[i] = single;
      return;
    case ValueType::kDouble:
      static_cast<double*>(values.data)[i] = value;
      return;
    case ValueType::kHalf:
      static_cast<__half*>(values.data)[i] = narrow<__half>(single);
      return;
    case ValueType::kBFloat16:
      static_cast<__nv_bfloat16*>(values.data)[i] = narrow<__nv_bfloat16>(single);
      return;
    case ValueType::kInt:
      static_cast<int32_t*>(values.data)[i] = static_cast<int32_t>(value);
      return;
    case ValueType::kLong:
      static_cast<int64_t*>(values.data)[i] = static_cast<int64_t>(value);
      return;
  }
}

}  // namespace syncbn::dist::detail::cuda
