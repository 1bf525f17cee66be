#include "reductions.h"

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace fake_nccl {
namespace {

/// Calls `body` with a zero of the C++ type.
template <class Body>
void with_type(ncclDataType_t type, const Body& body) {
  switch (type) {
    case ncclInt8:
      return body(int8_t{});
    case ncclUint8:
      return body(uint8_t{});
    case ncclInt32:
      return body(int32_t{});
    case ncclUint32:
      return body(uint32_t{});
    case ncclInt64:
      return body(int64_t{});
    case ncclUint64:
      return body(uint64_t{});
    case ncclFloat16:
      return body(c10::Half{});
    case ncclFloat32:
      return body(float{});
    case ncclFloat64:
      return body(double{});
    case ncclBfloat16:
      return body(c10::BFloat16{});
    default:
      throw std::logic_error("reduction of a type that is_reducible() refuses");
  }
}

template <class T>
T combine(T a, T b, ncclRedOp_t operation) {
  switch (operation) {
    case ncclProd:
      return static_cast<T>(a * b);
    case ncclMax:
      return a < b ? b : a;
    case ncclMin:
      return b < a ? b : a;
    default:
      return static_cast<T>(a + b);
  }
}

template <class T>
T divided(T sum, size_t count) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(sum / static_cast<T>(count));
  } else {
    return static_cast<T>(sum / static_cast<float>(count));
  }
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

bool is_reducible(ncclDataType_t type) {
  return type != ncclFloat8e4m3 && type != ncclFloat8e5m2;
}

void reduce(void* into, const std::vector<const void*>& parts, size_t count, ncclDataType_t type,
            ncclRedOp_t operation) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    auto* const results = static_cast<T*>(into);
    for (size_t i = 0; i < count; ++i) {
      T result = static_cast<const T*>(parts.front())[i];
      for (size_t part = 1; part < parts.size(); ++part) {
        result = combine(result, static_cast<const T*>(parts[part])[i], operation);
      }
      if (operation == ncclAvg) result = divided(result, parts.size());
      results[i] = result;
    }
  });
}

}  // namespace fake_nccl
