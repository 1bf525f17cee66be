// The loops that reduce the ranks' values in shared memory, for each instruction set of this
// processor, against plain loops, bit by bit.

#include "transport/reduce_loops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "dist/guarded.h"
#include "support/skip.h"
#include "transport/reduce.h"

namespace syncbn::dist::detail::shm {
namespace {

using c10d::ReduceOp;
using test::Guarded;
using test::same_bits;

// Close to multiples of vectors of 4 to 32 values and of blocks of 512 to 4096.
constexpr int64_t kSizes[] = {0, 1, 7, 8, 9, 31, 33, 511, 1000, 1025, 4097, 9001};

enum class Op { kSum, kProduct, kMin, kMax };
constexpr Op kOps[] = {Op::kSum, Op::kProduct, Op::kMin, Op::kMax};

Reduce loop_of(const ReduceLoops& loops, Op op) {
  switch (op) {
    case Op::kSum:
      return loops.sum;
    case Op::kProduct:
      return loops.product;
    case Op::kMin:
      return loops.min;
    default:
      return loops.max;
  }
}

template <class T>
T apply(Op op, T a, T b) {
  // Integer overflow wraps around.
  using Wide = std::conditional_t<std::is_integral_v<T>, uint64_t, T>;
  switch (op) {
    case Op::kSum:
      return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    case Op::kProduct:
      return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    case Op::kMin:
      return b < a ? b : a;
    default:
      return a < b ? b : a;
  }
}

template <class T>
class LoopsCheck {
 public:
  /// @param offset elements between a vector's alignment and the first input; the other inputs and
  ///   the result have other offsets
  LoopsCheck(int64_t n, int inputs, size_t offset) : n_(n), out_(n, (offset + 2) % 5) {
    for (int i = 0; i < inputs; ++i) {
      inputs_.emplace_back(n, offset);
      fill(inputs_.back().data());
      offset = (offset + 1) % 5;
    }
  }

  void expect_right(Reduce reduce, Op op, int divisor) {
    std::vector<const void*> in;
    for (Guarded<T>& input : inputs_) in.push_back(input.data());
    const std::vector<T> expected = plain(op, divisor);
    reduce(out_.data(), in.data(), static_cast<int>(in.size()), n_, divisor);
    expect_values(out_, expected);
    // The result replaces an input, which then gets new values for the next call.
    Guarded<T>& last = inputs_.back();
    reduce(last.data(), in.data(), static_cast<int>(in.size()), n_, divisor);
    expect_values(last, expected);
    fill(last.data());
  }

 private:
  void fill(T* values) {
    for (int64_t i = 0; i < n_; ++i) {
      if constexpr (std::is_integral_v<T>) {
        values[i] = static_cast<T>(random_());
      } else {
        values[i] = static_cast<T>(std::normal_distribution<double>()(random_));
      }
    }
    if (!std::is_integral_v<T> && n_ > 3) values[3] = std::numeric_limits<T>::infinity();
  }

  std::vector<T> plain(Op op, int divisor) {
    std::vector<T> result(inputs_[0].data(), inputs_[0].data() + n_);
    for (size_t i = 0; i < result.size(); ++i) {
      for (size_t input = 1; input < inputs_.size(); ++input) {
        result[i] = apply(op, result[i], inputs_[input].data()[i]);
      }
      if (divisor != 1) result[i] = static_cast<T>(result[i] / static_cast<T>(divisor));
    }
    return result;
  }

  void expect_values(Guarded<T>& actual, const std::vector<T>& expected) const {
    for (int64_t i = 0; i < n_; ++i) {
      ASSERT_TRUE(same_bits(actual.data()[i], expected[static_cast<size_t>(i)])) << i;
    }
    actual.expect_guards();
  }

  const int64_t n_;
  std::mt19937_64 random_{5};
  std::vector<Guarded<T>> inputs_;
  Guarded<T> out_;
};

template <class T>
void expect_right(const ReduceLoops& loops, const char* type) {
  for (const int64_t n : kSizes) {
    for (const int inputs : {2, 3, 5}) {
      for (const size_t offset : {0U, 1U, 3U}) {
        LoopsCheck<T> check(n, inputs, offset);
        for (const Op op : kOps) {
          SCOPED_TRACE(std::string(type) + ", " + std::to_string(n) + " values of " +
                       std::to_string(inputs) + ", from " + std::to_string(offset) +
                       ", operation " + std::to_string(static_cast<int>(op)));
          check.expect_right(loop_of(loops, op), op, 1);
          if (!std::is_integral_v<T>) check.expect_right(loop_of(loops, op), op, 3);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

void expect_right(const ReduceTable& table) {
  expect_right<float>(table.of_float, "float");
  expect_right<double>(table.of_double, "double");
  expect_right<int8_t>(table.of_int8, "int8");
  expect_right<uint8_t>(table.of_uint8, "uint8");
  expect_right<int32_t>(table.of_int32, "int32");
  expect_right<int64_t>(table.of_int64, "int64");
}

/// All values of float16, and values between any two of them, in runs of all lengths.
void expect_right(const HalfConversion& conversion) {
  constexpr int64_t kAll = 65536;
  std::vector<uint16_t> all(kAll);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const auto value_of = [](uint16_t bits) {
    return static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
  };
  int64_t n = 0;
  for (int64_t begin = 0; begin < kAll; begin += n, ++n) {
    n = std::min(n % 40, kAll - begin);
    Guarded<float> values(n, 1);
    conversion.load(all.data() + begin, values.data(), n);
    values.expect_guards();
    for (int64_t i = 0; i < n; ++i) {
      const float expected = value_of(all[static_cast<size_t>(begin + i)]);
      float& value = values.data()[i];
      ASSERT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected))) << begin + i;
      // At the midpoint to the next value, where rounding goes to the even one, or close to it.
      const float next = value_of(static_cast<uint16_t>(begin + i + 1));
      value = (expected + next) / 2 * (1 + 0x1p-20F * static_cast<float>(i % 3 - 1));
    }
    Guarded<uint16_t> halves(n, 1);
    conversion.store(values.data(), halves.data(), n);
    halves.expect_guards();
    for (int64_t i = 0; i < n; ++i) {
      const c10::Half expected(values.data()[i]);
      const bool is_nan = std::isnan(static_cast<float>(expected));
      const uint16_t half = halves.data()[i];
      ASSERT_TRUE(is_nan ? std::isnan(value_of(half)) : half == expected.x) << begin + i;
    }
  }
}

TEST(ReduceLoopsTest, AreRightOnAnyProcessor) {
  const ReduceTable& table = baseline::reduce_table();
  expect_right(table);
  // Not null if the compiler may use the instructions everywhere.
  if (table.half.load != nullptr) expect_right(table.half);
}

#ifdef SYNCBN_HAVE_AVX2
TEST(ReduceLoopsTest, AreRightWithAvx2) {
  SYNCBN_SKIP_UNLESS(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "avx2");
  const ReduceTable& table = avx2::reduce_table();
  expect_right(table);
  ASSERT_TRUE(table.half.load != nullptr && table.half.store != nullptr);
  expect_right(table.half);
}
#endif

/// Uses the loops for this processor.
template <class T>
void expect_rounds_once(at::ScalarType type) {
  constexpr ReduceOp::RedOpType kTypes[] = {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN,
                                            ReduceOp::MAX};
  std::mt19937_64 random(7);
  for (const int64_t n : kSizes) {
    std::vector<std::vector<T>> values(4, std::vector<T>(static_cast<size_t>(n)));
    std::vector<const void*> in;
    for (std::vector<T>& one : values) {
      for (T& value : one) value = static_cast<T>(std::normal_distribution<float>()(random));
      in.push_back(one.data());
    }
    for (const Op op : kOps) {
      for (const int divisor : {1, 3}) {
        Guarded<T> out(n, 1);
        find_reduce(type, kTypes[static_cast<size_t>(op)])(out.data(), in.data(), 4, n, divisor);
        for (size_t i = 0; i < values[0].size(); ++i) {
          auto expected = static_cast<float>(values[0][i]);
          for (size_t input = 1; input < values.size(); ++input) {
            expected = apply(op, expected, static_cast<float>(values[input][i]));
          }
          if (divisor != 1) expected /= static_cast<float>(divisor);
          ASSERT_TRUE(same_bits(out.data()[i], static_cast<T>(expected)))
              << n << ", " << i << ", operation " << static_cast<int>(op);
        }
        out.expect_guards();
      }
    }
  }
}

TEST(ReduceLoopsTest, HalfPrecisionIsRoundedOnce) {
  expect_rounds_once<c10::Half>(at::kHalf);
  expect_rounds_once<c10::BFloat16>(at::kBFloat16);
}

TEST(ReduceLoopsTest, WhatTheyDoNotKnowHasNone) {
  for (const auto op : {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR, ReduceOp::PREMUL_SUM}) {
    EXPECT_EQ(find_reduce(at::kInt, op), nullptr);
    EXPECT_EQ(find_reduce(at::kFloat, op), nullptr);
  }
  for (const auto type : {at::kInt, at::kLong, at::kChar, at::kByte, at::kBool}) {
    EXPECT_EQ(find_reduce(type, ReduceOp::AVG), nullptr) << type;
    EXPECT_NE(find_reduce(type, ReduceOp::SUM), nullptr) << type;
  }
  for (const auto type : {at::kShort, at::kComplexFloat}) {
    EXPECT_EQ(find_reduce(type, ReduceOp::SUM), nullptr) << type;
  }
}

// The sum of bools is "any", the product "all". Added as bytes, 1 + 1 would not be a bool.
TEST(ReduceLoopsTest, SumsOfBoolsAreBools) {
  const bool a[] = {false, false, true, true};
  const bool b[] = {false, true, false, true};
  const void* const in[] = {a, b};
  bool any[4];
  bool all[4];
  find_reduce(at::kBool, ReduceOp::SUM)(any, in, 2, 4, 1);
  find_reduce(at::kBool, ReduceOp::PRODUCT)(all, in, 2, 4, 1);
  for (size_t i = 0; i < 4; ++i) {
    uint8_t bytes[2];
    std::memcpy(&bytes[0], &any[i], 1);
    std::memcpy(&bytes[1], &all[i], 1);
    EXPECT_EQ(bytes[0], a[i] || b[i] ? 1 : 0) << i;
    EXPECT_EQ(bytes[1], a[i] && b[i] ? 1 : 0) << i;
  }
}

}  // namespace
}  // namespace syncbn::dist::detail::shm
