#include "transport/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

namespace syncbn::dist::detail::shm {
namespace {

using c10d::ReduceOp;

const ReduceTable& table() {
#ifdef SYNCBN_HAVE_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) return avx2::reduce_table();
#endif
  return baseline::reduce_table();
}

template <class Half>
void load(const Half* from, float* to, int64_t n) {
  if (const auto convert = table().half.load; std::is_same_v<Half, c10::Half> && convert) {
    return convert(from, to, n);
  }
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

template <class Half>
void store(const float* from, Half* to, int64_t n) {
  if (const auto convert = table().half.store; std::is_same_v<Half, c10::Half> && convert) {
    return convert(from, to, n);
  }
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Half>(from[i]);
}

/// Converts one block of values at a time to float32, and reduces it with the float32 loops.
template <class Half, ReduceOp::RedOpType kOp>
void reduce_half(void* out, const void* const* in, int inputs, int64_t n, int divisor) {
  constexpr int64_t kBlock = 1024;
  float sum[kBlock];
  float next[kBlock];
  const void* both[] = {sum, next};
  const Reduce reduce = find_reduce(at::kFloat, kOp);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t length = std::min(kBlock, n - begin);
    const auto values_of = [&](int input) { return static_cast<const Half*>(in[input]) + begin; };
    load(values_of(0), sum, length);
    for (int input = 1; input < inputs; ++input) {
      load(values_of(input), next, length);
      reduce(sum, both, 2, length, input + 1 == inputs ? divisor : 1);
    }
    store(sum, static_cast<Half*>(out) + begin, length);
  }
}

template <class Half>
constexpr ReduceLoops kHalfLoops{
    reduce_half<Half, ReduceOp::SUM>, reduce_half<Half, ReduceOp::PRODUCT>,
    reduce_half<Half, ReduceOp::MIN>, reduce_half<Half, ReduceOp::MAX>};

const ReduceLoops* loops_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return &table().of_float;
    case at::kDouble:
      return &table().of_double;
    case at::kHalf:
      return &kHalfLoops<c10::Half>;
    case at::kBFloat16:
      return &kHalfLoops<c10::BFloat16>;
    case at::kInt:
      return &table().of_int32;
    case at::kLong:
      return &table().of_int64;
    case at::kChar:
      return &table().of_int8;
    case at::kByte:
    case at::kBool:
      return &table().of_uint8;
    default:
      return nullptr;
  }
}

}  // namespace

Reduce find_reduce(at::ScalarType type, ReduceOp::RedOpType op) {
  const ReduceLoops* loops = loops_of(type);
  if (loops == nullptr) return nullptr;
  const bool is_bool = type == at::kBool;  // SUM is a logical or, PRODUCT a logical and
  switch (op) {
    case ReduceOp::SUM:
      return is_bool ? loops->max : loops->sum;
    case ReduceOp::AVG:
      return at::isFloatingType(type) ? loops->sum : nullptr;
    case ReduceOp::PRODUCT:
      return is_bool ? loops->min : loops->product;
    case ReduceOp::MIN:
      return loops->min;
    case ReduceOp::MAX:
      return loops->max;
    default:
      return nullptr;
  }
}

}  // namespace syncbn::dist::detail::shm
