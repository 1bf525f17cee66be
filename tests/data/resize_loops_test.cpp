#include "image/resize_kernels.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support/skip.h"

namespace syncbn::data::detail {
namespace {

#ifdef __x86_64__

/// 40 outputs of up to seven inputs each.
ResizeAxis some_axis() {
  ResizeAxis axis;
  axis.taps = 7;
  for (int i = 0; i < 40; ++i) {
    axis.first.push_back(i * 2);
    axis.count.push_back(1 + i % 7);
    for (int k = 0; k < 7; ++k) axis.weights.push_back((1 << kWeightBits) / (1 + i % 7) - k);
  }
  return axis;
}

TEST(ResizeLoopsTest, GiveTheSameOnEveryInstructionSet) {
  SYNCBN_SKIP_UNLESS(__builtin_cpu_supports("avx2"), "avx2");
  const ResizeLoops plain = baseline::resize_loops();
  const ResizeLoops fast = avx2::resize_loops();
  const ResizeAxis axis = some_axis();
  std::vector<uint8_t> in(size_t{7} * 301);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i * i * 31 + i % 7 * 90);
  const auto expect_same = [](const auto& run, const ResizeLoops& one, const ResizeLoops& other) {
    std::vector<uint8_t> first(301), second(301);
    run(one, first.data());
    run(other, second.data());
    EXPECT_EQ(first, second);
  };
  expect_same(
      [&](const ResizeLoops& loops, uint8_t* out) { loops.rgb_row(in.data(), out, 40, axis); },
      plain, fast);
  expect_same(
      [&](const ResizeLoops& loops, uint8_t* out) { loops.grey_row(in.data(), out, 40, axis); },
      plain, fast);
  expect_same(
      [&](const ResizeLoops& loops, uint8_t* out) {
        loops.column(in.data(), out, 301, axis.weights.data() + 6 * axis.taps, 7);
      },
      plain, fast);
}

#endif

}  // namespace
}  // namespace syncbn::data::detail
