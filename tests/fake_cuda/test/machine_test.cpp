// The fake CUDA devices follow the rules of real ones: they refuse what a program may not do, and
// show what it forgets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/gpus.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "fake_cuda.h"
#include "support/eventually.h"
#include "test/on_gpu.h"

namespace {

using fake_cuda::Count;
using fake_cuda::kOnGpu;
using fake_cuda::lag;
using syncbn::test::eventually;
using ::testing::HasSubstr;

TEST(FakeDevicesTest, AreThoseThatNvmlKnowsAndThatAreVisible) {
  ::setenv("FAKE_CUDA_DEVICES", "8", 1);
  ::setenv("CUDA_VISIBLE_DEVICES", "5,2,9,1", 1);  // 9 does not exist, and ends the list
  ASSERT_EQ(c10::cuda::device_count(), 2);
  const auto machine = syncbn::base::machine_gpus();
  ASSERT_EQ(machine.size(), 8U);
  std::array<char, 32> address{};
  ASSERT_EQ(cudaDeviceGetPCIBusId(address.data(), address.size(), 1), cudaSuccess);
  EXPECT_STRCASEEQ(address.data(), machine[2].address.c_str());
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_STREQ(cudaGetErrorName(cudaGetLastError()), "cudaErrorInvalidDevice");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(FakeDevicesTest, AProcessThatUsedThemCannotForkUsers) {
  at::ones({4}, kOnGpu);
  const pid_t child = ::fork();
  if (child == 0) {
    void* memory = nullptr;
    ::_exit(cudaMalloc(&memory, 1) == cudaErrorInitializationError ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(FakeDevicesTest, NoLibraryOfNvidiaIsLoaded) {
  at::ones({4}, kOnGpu);
  std::ifstream maps("/proc/self/maps");
  const std::string text{std::istreambuf_iterator<char>(maps), {}};
  EXPECT_THAT(text, HasSubstr("libtorch_cuda.so"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("/nvidia/")));
}

TEST(FakeMemoryTest, TheHostCannotFollowADevicePointer) {
  const at::Tensor tensor = at::ones({4}, kOnGpu);
  EXPECT_EXIT(std::exit(static_cast<int>(*tensor.const_data_ptr<float>())),
              ::testing::KilledBySignal(SIGSEGV), "");
}

TEST(FakeMemoryTest, EndsWhereADeviceIsFull) {
  ::setenv("FAKE_CUDA_MEMORY_MB", "64", 1);
  constexpr int64_t kMegabyte = 1 << 20;
  const auto bytes = kOnGpu.dtype(at::kByte);
  at::Tensor half = at::empty({40 * kMegabyte}, bytes);
  EXPECT_THROW(at::empty({40 * kMegabyte}, bytes), c10::OutOfMemoryError);
  // The other device has its own memory.
  at::empty({40 * kMegabyte}, bytes.device(at::kCUDA, 1));
  half.reset();
  const at::Tensor again = at::empty({50 * kMegabyte}, bytes);  // frees cached blocks
  size_t free = 0;
  size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total, size_t{64} << 20);
  EXPECT_EQ(free, size_t{14} << 20);
}

TEST(FakeMemoryTest, ErrorsAreCudas) {
  EXPECT_EQ(cudaFree(this), cudaErrorInvalidValue);
  EXPECT_EQ(cudaHostUnregister(this), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaMemset(this, 0, 1), cudaErrorInvalidValue);
  cudaPointerAttributes attributes{};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, this), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

// How often in 20 tries a stream reads something other than what another stream writes.
int wrong_results(bool waits) {
  const auto side = c10::cuda::getStreamFromPool();
  int wrong = 0;
  for (int i = 0; i < 20; ++i) {
    const at::Tensor input = at::full({100}, i, kOnGpu);
    if (waits) {
      at::cuda::CUDAEvent event;
      event.record();
      event.block(side);
    }
    const c10::cuda::CUDAStreamGuard guard(side);
    wrong += (input * 2).cpu().eq(2 * i).all().item<bool>() ? 0 : 1;
  }
  return wrong;
}

TEST(FakeStreamsTest, AMissingWaitIsSeen) {
  lag("1");
  EXPECT_GT(wrong_results(false), 0);
}

TEST(FakeStreamsTest, WithAWaitAllIsRight) {
  lag("1");
  EXPECT_EQ(wrong_results(true), 0);
}

// An operator reads its inputs when its stream reaches it, not when it is called.
TEST(FakeStreamsTest, AnInputThatIsOverwrittenTooEarlyIsSeen) {
  lag("1");
  const auto side = c10::cuda::getStreamFromPool();
  int wrong = 0;
  for (int i = 0; i < 40; ++i) {
    const at::Tensor input = at::ones({100}, kOnGpu);
    c10::cuda::device_synchronize();
    at::Tensor result;
    {
      const c10::cuda::CUDAStreamGuard guard(side);
      result = input * 2;
    }
    input.fill_(5);  // on the current stream, which does not wait for the other
    c10::cuda::device_synchronize();
    wrong += result.cpu().eq(2).all().item<bool>() ? 0 : 1;
  }
  EXPECT_GT(wrong, 0);
}

// The allocator gives the memory of a freed tensor to the next tensor on the same stream.
int wrong_with_freed_memory(bool records_stream) {
  const auto side = c10::cuda::getStreamFromPool();
  int wrong = 0;
  for (int i = 0; i < 40; ++i) {
    at::Tensor input = at::ones({100}, kOnGpu);
    c10::cuda::device_synchronize();
    at::Tensor result;
    {
      const c10::cuda::CUDAStreamGuard guard(side);
      result = input * 2;
    }
    if (records_stream) input.record_stream(side);
    input.reset();
    const at::Tensor next = at::full({100}, 7, kOnGpu);
    c10::cuda::device_synchronize();
    wrong += result.cpu().eq(2).all().item<bool>() ? 0 : 1;
  }
  return wrong;
}

TEST(FakeStreamsTest, MemoryThatIsFreedTooEarlyIsSeen) {
  lag("1");
  EXPECT_GT(wrong_with_freed_memory(false), 0);
}

TEST(FakeStreamsTest, WithRecordStreamMemoryIsKept) {
  lag("1");
  EXPECT_EQ(wrong_with_freed_memory(true), 0);
}

size_t threads() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

TEST(FakeStreamsTest, AreFreedOnceTheyHaveRun) {
  lag("1");
  at::ones({1}, kOnGpu);
  const size_t before = threads();
  std::atomic<int> runs{0};
  for (int i = 0; i < 50; ++i) {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(fake_cuda::enqueue(stream, [&runs] { ++runs; }), cudaSuccess);
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  }
  eventually([&] { return threads() <= before && runs == 50; });
  EXPECT_EQ(runs, 50);
  EXPECT_LE(threads(), before);
}

TEST(FakeStreamsTest, EventsMeasureTime) {
  at::cuda::CUDAEvent start(cudaEventDefault);
  at::cuda::CUDAEvent end(cudaEventDefault);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  std::atomic<bool> was_queried{false};
  start.record();
  const auto work = [&] {
    was_queried.wait(false);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the time that is measured
  };
  ASSERT_EQ(fake_cuda::enqueue(stream, work, true), cudaSuccess);
  end.record();
  EXPECT_FALSE(end.query());
  EXPECT_FALSE(stream.query());
  was_queried = true;
  was_queried.notify_one();
  end.synchronize();
  EXPECT_TRUE(end.query());
  EXPECT_GE(start.elapsed_time(end), 20);
}

TEST(FakeCountsTest, CopiesAndWaitsAreCountedByKind) {
  const auto pinned = at::TensorOptions().pinned_memory(true);
  const at::Tensor host = at::ones({8});
  const at::Tensor pinned_host = at::ones({8}, pinned);
  at::Tensor gpu = at::zeros({8}, kOnGpu);
  const auto of = [](const auto& run) {
    const fake_cuda::Counts before = fake_cuda::counts();
    run();
    return fake_cuda::counts() - before;
  };
  auto counts = of([&] { gpu.copy_(pinned_host, /*non_blocking=*/true); });
  EXPECT_EQ(counts[Count::kHostToDevice], 1U);
  EXPECT_EQ(counts.host_waits(), 0U);
  counts = of([&] { gpu.copy_(host); });
  EXPECT_EQ(counts[Count::kHostToDevice], 1U);
  EXPECT_EQ(counts[Count::kStreamWaits], 1U);
  counts = of([&] { pinned_host.copy_(gpu, /*non_blocking=*/true); });
  EXPECT_EQ(counts[Count::kDeviceToHost], 1U);
  EXPECT_EQ(counts.host_waits(), 0U);
  counts = of([&] { host.copy_(gpu, /*non_blocking=*/true); });
  EXPECT_EQ(counts[Count::kPageableWaits], 1U);
  counts = of([&] { gpu.sum().item<float>(); });
  EXPECT_EQ(counts[Count::kOperators], 1U);
  EXPECT_EQ(counts[Count::kDeviceToHost], 1U);
  EXPECT_EQ(counts[Count::kStreamWaits], 1U);
  counts = of([&] { gpu.clone(); });
  EXPECT_EQ(counts[Count::kDeviceToDevice], 1U);
  counts = of([&] { c10::cuda::device_synchronize(); });
  EXPECT_EQ(counts[Count::kDeviceWaits], 1U);
}

TEST(FakeDevicesTest, WorkThatFailsLosesThem) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  at::ones({1}, kOnGpu);
  const auto fails = [] { throw std::runtime_error("as an assertion in a kernel does"); };
  ASSERT_EQ(fake_cuda::enqueue(stream, fails), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorAssert);
  EXPECT_EQ(cudaGetLastError(), cudaErrorAssert);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorAssert);  // permanently
  EXPECT_STREQ(cudaGetErrorString(cudaErrorAssert), "device-side assert triggered");
}

}  // namespace
