// Run on a machine with a GPU: ctest -L gpu.
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <unistd.h>

#include "dist/gpus.h"
#include "fake_cuda/counts.h"
#include "step/model.h"
#include "support/eventually.h"
#include "support/skip.h"

namespace syncbn::train {
namespace {

constexpr auto kContiguous = at::MemoryFormat::Contiguous;
constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

/// On the fake CUDA devices, also counts the waits.
void expect_same_without_waits(const data::Batch& batch, BatchToDevice::Options options) {
  options.device = at::kCPU;
  const data::Batch expected = BatchToDevice(options)(batch);
  options.device = dist::device();
  const BatchToDevice to_gpu(options);
  const bool is_counted = fake_cuda::counters() != nullptr;
  const auto before = is_counted ? fake_cuda::counts() : fake_cuda::Counts();
  const data::Batch on_gpu = to_gpu(batch);
  if (is_counted) {
    const auto counts = fake_cuda::counts() - before;
    EXPECT_EQ(counts.host_waits(), 0U);
  }
  EXPECT_EQ(on_gpu.data.scalar_type(), options.image_type);
  EXPECT_TRUE(on_gpu.data.is_contiguous(options.memory_format));
  EXPECT_TRUE(on_gpu.data.cpu().equal(expected.data));
  EXPECT_TRUE(on_gpu.target.cpu().equal(expected.target));
}

TEST(GpuBatchTest, MakesInputOfBytes) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 0, "gpu");
  test::run_ranks(1, [](int) {
    dist::init_process_group();
    at::manual_seed(1);
    const auto pinned = [](const at::Tensor& tensor) { return tensor.pin_memory(); };
    for (const at::MemoryFormat from : {kContiguous, kChannelsLast}) {
      const data::Batch batch{
          .data = pinned(at::randint(256, {3, 3, 9, 7}, at::kByte).contiguous(from)),
          .target = pinned(at::arange(3, at::kLong))};
      data::Batch in_corners = batch;
      in_corners.sizes = pinned(at::tensor({9, 7, 4, 5, 1, 2}, at::kLong).view({3, 2}));
      for (const at::MemoryFormat to : {kContiguous, kChannelsLast}) {
        for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
          const BatchToDevice::Options options{.device = at::kCPU,
                                               .pinned = true,
                                               .memory_format = to,
                                               .normalization = data::Normalization::imagenet(),
                                               .image_type = type};
          expect_same_without_waits(batch, options);
          expect_same_without_waits(in_corners, options);
        }
      }
    }
    dist::destroy_process_group();
  });
}

TEST(GpuBatchTest, IsCopiedWhileTheStepBeforeStillRuns) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 1, "two-gpus");
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  test::run_ranks(2, [&](int rank) {
    dist::init_process_group({.backend = "nccl"});
    const data::Batch batch{.data = at::ones({2, 1, 4, 4}, at::kByte).pin_memory(),
                            .target = at::arange(2, at::kLong).pin_memory()};
    const BatchToDevice to_gpu(
        {.device = dist::device(), .pinned = true, .normalization = {{0.0}, {1.0}}});
    to_gpu(batch);  // loads the kernels, which may wait for the device
    at::Tensor value = at::ones({3}, at::TensorOptions().device(dist::device()));
    dist::all_reduce(value);
    EXPECT_EQ(value[0].item<float>(), 2);
    char copied = 0;
    if (rank == 1) {
      EXPECT_EQ(::read(ends[0], &copied, 1), 1);
    }
    dist::all_reduce(value);  // rank 0's stream waits for rank 1
    if (rank == 0) {
      const data::Batch on_gpu = to_gpu(batch);
      const c10::impl::VirtualGuardImpl device(at::kCUDA);
      EXPECT_TRUE(test::eventually([&] {
        const c10::StreamGuard other(device.getStreamFromGlobalPool(dist::device()));
        return on_gpu.data.cpu().allclose(at::full({2, 1, 4, 4}, 1.0F / 255)) &&
               on_gpu.target.cpu().equal(batch.target);
      }));
      EXPECT_EQ(::write(ends[1], &copied, 1), 1);
    }
    EXPECT_EQ(value[0].item<float>(), 4);
    dist::destroy_process_group();
  });
}

}  // namespace
}  // namespace syncbn::train
