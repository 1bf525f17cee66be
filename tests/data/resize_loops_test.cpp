#include "image/resize_kernels.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support/skip.h"

namespace syncbn::data::detail {
namespace {

#ifdef __x86_64__

/// 40 outputs with `taps` inputs each.
ResizeAxis even_axis(int taps) {
  ResizeAxis axis;
  axis.taps = taps;
  axis.is_even = true;
  for (int i = 0; i < 40; ++i) {
    axis.first.push_back(i * 2);
    axis.count.push_back(taps);
    for (int k = 0; k < taps; ++k) axis.weights.push_back((1 << kWeightBits) / taps - i + k);
  }
  return axis;
}

/// 40 outputs with up to seven inputs each.
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

TEST(ResizeLoopsTest, AgreeOnEveryInstructionSet) {
  SYNCBN_SKIP_UNLESS(__builtin_cpu_supports("avx2"), "avx2");
  const PixelLoops plain = baseline::pixel_loops();
  const PixelLoops fast = avx2::pixel_loops();
  const ResizeAxis axis = some_axis();
  std::vector<uint8_t> in(size_t{7} * 301);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i * i * 31 + i % 7 * 90);
  const auto expect_same = [](const auto& run, const PixelLoops& one, const PixelLoops& other) {
    std::vector<uint8_t> first(303), second(303);
    run(one, first.data());
    run(other, second.data());
    EXPECT_EQ(first, second);
  };
  expect_same(
      [&](const PixelLoops& loops, uint8_t* out) { loops.rgb_row(in.data(), out, 40, axis); },
      plain, fast);
  for (const int taps : {2, 4, 6, 8, 10}) {
    const ResizeAxis even = even_axis(taps);
    for (const int64_t width : {1, 2, 3, 40}) {
      expect_same([&](const PixelLoops& loops,
                      uint8_t* out) { loops.rgb_row(in.data(), out, width, even); },
                  plain, fast);
    }
  }
  expect_same(
      [&](const PixelLoops& loops, uint8_t* out) { loops.grey_row(in.data(), out, 40, axis); },
      plain, fast);
  expect_same(
      [&](const PixelLoops& loops, uint8_t* out) {
        loops.column(in.data(), out, 301, axis.weights.data() + 6 * axis.taps, 7);
      },
      plain, fast);
  expect_same(
      [&](const PixelLoops& loops, uint8_t* out) { loops.rgb_planes(in.data(), 101, out, 101); },
      plain, fast);
}

#endif

TEST(ResizeLoopsTest, SplitsChannelsIntoPlanes) {
  const std::vector<uint8_t> in = {1, 2, 3, 4, 5, 6};
  std::vector<uint8_t> out(6);
  pixel_loops().rgb_planes(in.data(), 2, out.data(), 2);
  EXPECT_EQ(out, (std::vector<uint8_t>{1, 4, 2, 5, 3, 6}));
}

}  // namespace
}  // namespace syncbn::data::detail
