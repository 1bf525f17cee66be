// The CUDA kernel that normalises images, run by the emulator, against a plain loop.

#include "cuda_emulator/normalize_kernel.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <vector>

namespace syncbn::data::cuda {
namespace {

template <class T>
constexpr ImageType kTypeOf = ImageType::kFloat;
template <>
constexpr ImageType kTypeOf<__half> = ImageType::kHalf;
template <>
constexpr ImageType kTypeOf<__nv_bfloat16> = ImageType::kBFloat16;

struct Case {
  int64_t samples;
  int channels, height, width;
  bool from_channels_last, to_channels_last, with_sizes;
  size_t offset = 0;  ///< bytes before the images in their allocation
};

/// The offset of channel `c` of pixel `p`.
size_t place(const Case& shape, bool channels_last, int64_t sample, int c, int p) {
  const int pixels = shape.height * shape.width;
  const int inside = channels_last ? p * shape.channels + c : c * pixels + p;
  return static_cast<size_t>(sample * shape.channels * pixels + inside);
}

/// The vectors end with the last value, so that a sanitizer finds accesses beyond it.
template <class T>
void expect_as_a_loop(const Case& shape) {
  const int pixels = shape.height * shape.width;
  const auto count = static_cast<size_t>(shape.samples * shape.channels * pixels);
  std::mt19937 random(7);
  std::vector<uint8_t> images(shape.offset + count);
  for (uint8_t& byte : images) byte = static_cast<uint8_t>(random());
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < shape.samples; ++i) {
    sizes.push_back(1 + static_cast<int64_t>(random()) % shape.height);
    sizes.push_back(1 + static_cast<int64_t>(random()) % shape.width);
  }
  std::vector<T> output(count);
  NormalizeArguments arguments{.images = images.data() + shape.offset,
                               .output = output.data(),
                               .sizes = shape.with_sizes ? sizes.data() : nullptr,
                               .samples = shape.samples,
                               .channels = shape.channels,
                               .height = shape.height,
                               .width = shape.width,
                               .from_channels_last = shape.from_channels_last,
                               .to_channels_last = shape.to_channels_last,
                               .aligned = shape.offset == 0 && arguments.values() % kPack == 0};
  for (int c = 0; c < shape.channels; ++c) {
    arguments.mean[c] = 100.0F + 7 * static_cast<float>(c);
    arguments.std[c] = 50.0F + 3 * static_cast<float>(c);
  }
  emulate(arguments, kTypeOf<T>);
  for (int64_t n = 0; n < shape.samples; ++n) {
    const int64_t* const size = &sizes[static_cast<size_t>(2 * n)];
    for (int p = 0; p < pixels; ++p) {
      const bool is_inside =
          !shape.with_sizes || (p / shape.width < size[0] && p % shape.width < size[1]);
      for (int c = 0; c < shape.channels; ++c) {
        const uint8_t byte = arguments.images[place(shape, shape.from_channels_last, n, c, p)];
        const float value = (static_cast<float>(byte) - arguments.mean[c]) / arguments.std[c];
        const T expected = static_cast<T>(is_inside ? value : 0.0F);
        const T actual = output[place(shape, shape.to_channels_last, n, c, p)];
        ASSERT_EQ(static_cast<float>(actual), static_cast<float>(expected))
            << fmt::format("sample {}, channel {}, pixel {}", n, c, p);
      }
    }
  }
}

TEST(NormalizeKernelTest, GivesWhatALoopGives) {
  for (const bool from : {false, true}) {
    for (const bool to : {false, true}) {
      for (const bool with_sizes : {false, true}) {
        // Whole packs; tails; one pixel; several blocks; packs that are not aligned.
        for (const Case& shape :
             {Case{2, 3, 4, 8, from, to, with_sizes}, Case{3, 3, 5, 7, from, to, with_sizes},
              Case{2, 5, 1, 1, from, to, with_sizes}, Case{1, 1, 67, 71, from, to, with_sizes},
              Case{2, 4, 32, 32, from, to, with_sizes, /*offset=*/3}}) {
          SCOPED_TRACE(fmt::format("{}x{}x{}x{} {}{}{}", shape.samples, shape.channels,
                                   shape.height, shape.width, from, to, with_sizes));
          expect_as_a_loop<float>(shape);
          expect_as_a_loop<__half>(shape);
          expect_as_a_loop<__nv_bfloat16>(shape);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(NormalizeKernelTest, TakesMoreSamplesThanAGridHasRows) {
  expect_as_a_loop<float>({65537, 1, 1, 1, false, false, true});
}

}  // namespace
}  // namespace syncbn::data::cuda
