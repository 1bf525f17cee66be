// Tests the emulator itself: it must show every time what a wrong kernel shows on a GPU only
// sometimes.

#include "cuda_emulator/emulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace cuda_emulator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Reverses the block's values through shared memory.
void reverse(std::vector<int>& values, int* shared, bool waits) {
  int* const own = values.data() + blockIdx.x * blockDim.x;
  shared[threadIdx.x] = own[threadIdx.x];
  if (waits) __syncthreads();
  own[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

/// Whether reverse() gives the right result with this order of warps.
bool reverses(uint64_t seed, bool waits) {
  std::vector<int> values(7 * 128);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i);
  run({.grid = dim3(7), .block = dim3(128), .seed = seed}, 128 * sizeof(int),
      [&](void* shared) { reverse(values, static_cast<int*>(shared), waits); });
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t block = i / 128 * 128;
    if (values[i] != static_cast<int>(block + 127 - i % 128)) return false;
  }
  return true;
}

TEST(CudaEmulatorTest, AMissingBarrierIsSeenInEveryOrder) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_TRUE(reverses(seed, /*waits=*/true)) << seed;
    EXPECT_FALSE(reverses(seed, /*waits=*/false)) << seed;
  }
}

TEST(CudaEmulatorTest, LanesExchangeValues) {
  const int lanes = 64;
  std::vector<double> sums(lanes);
  std::vector<int> neighbours(lanes);
  std::vector<unsigned> odd(lanes);
  run({.grid = dim3(1), .block = dim3(lanes), .seed = 3}, 0, [&](void*) {
    double sum = threadIdx.x;
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    sums[threadIdx.x] = sum;
    neighbours[threadIdx.x] = __shfl_down_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x), 1);
    __syncwarp();
    odd[threadIdx.x] = __ballot_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x % 2));
  });
  for (int i = 0; i < lanes; ++i) {
    const auto at = static_cast<size_t>(i);
    EXPECT_EQ(sums[at], i < 32 ? 31 * 16 : 31 * 16 + 32 * 32);
    EXPECT_EQ(neighbours[at], i % 32 == 31 ? i : i + 1);
    EXPECT_EQ(odd[at], 0xAAAAAAAAu);
  }
}

TEST(CudaEmulatorTest, BlocksCountThemselvesInAnyOrder) {
  std::vector<unsigned> lasts;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    unsigned ticket = 0;
    int total = 0;
    unsigned last = 0;
    run({.grid = dim3(3, 5), .block = dim3(1), .seed = seed}, 0, [&](void*) {
      atomicAdd(&total, 1);
      if (atomicInc(&ticket, 14) == 14) last = blockIdx.y * 3 + blockIdx.x;
    });
    EXPECT_EQ(total, 15);
    EXPECT_EQ(ticket, 0u);
    lasts.push_back(last);
  }
  EXPECT_THAT(lasts, ::testing::Not(::testing::Each(lasts.front())));
}

std::string error_of(const std::function<void()>& thread) {
  try {
    run({.grid = dim3(1), .block = dim3(64)}, 0, [&](void*) { thread(); });
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return "";
}

TEST(CudaEmulatorTest, AThreadThatSkipsABarrierIsNamed) {
  EXPECT_THAT(error_of([] {
                if (threadIdx.x != 5) __syncthreads();
              }),
              AllOf(HasSubstr("63 wait for the block"), HasSubstr("1 have returned")));
  EXPECT_THAT(error_of([] {
                if (threadIdx.x < 40) __ballot_sync(0xFFFFFFFFu, 1);
              }),
              AllOf(HasSubstr("8 for their warp"), HasSubstr("have returned")));
  EXPECT_THAT(error_of([] { __ballot_sync(threadIdx.x % 2 == 0 ? 0xFFu : 0xFFFFu, 1); }),
              HasSubstr("different masks"));
}

TEST(CudaEmulatorTest, ThrowsWhatAThreadThrows) {
  EXPECT_EQ(error_of([] {
              __syncthreads();
              if (threadIdx.x == 7) throw std::logic_error("seven");
            }),
            "seven");
  EXPECT_EQ(error_of([] { __syncthreads(); }), "") << "and runs on";
}

}  // namespace
}  // namespace cuda_emulator
