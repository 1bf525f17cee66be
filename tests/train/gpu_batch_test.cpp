// Run on a machine with a GPU: ctest -L gpu.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>

#include "dist/gpus.h"
#include "fake_cuda/counts.h"
#include "step/model.h"
#include "support/skip.h"

namespace syncbn::train {
namespace {

constexpr auto kContiguous = at::MemoryFormat::Contiguous;
constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

/// On the pretended machine also counts what a batch asks of the GPU.
void expect_same_and_one_launch(const data::Batch& batch, BatchToDevice::Options options) {
  options.device = at::kCPU;
  const data::Batch expected = BatchToDevice(options)(batch);
  options.device = dist::device();
  const BatchToDevice to_gpu(options);
  const bool is_counted = fake_cuda::counters() != nullptr;
  const auto before = is_counted ? fake_cuda::counts() : fake_cuda::Counts();
  const data::Batch on_gpu = to_gpu(batch);
  if (is_counted) {
    const auto counts = fake_cuda::counts() - before;
    EXPECT_EQ(counts[fake_cuda::Count::kKernels], 1U);
    EXPECT_EQ(counts[fake_cuda::Count::kOperators], 0U);
    EXPECT_EQ(counts.host_waits(), 0U);
  }
  EXPECT_EQ(on_gpu.data.scalar_type(), options.image_type);
  EXPECT_TRUE(on_gpu.data.is_contiguous(options.memory_format));
  EXPECT_TRUE(on_gpu.data.cpu().equal(expected.data));
  EXPECT_TRUE(on_gpu.target.cpu().equal(expected.target));
}

TEST(GpuBatchTest, OneKernelMakesInputOfBytes) {
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
          expect_same_and_one_launch(batch, options);
          expect_same_and_one_launch(in_corners, options);
        }
      }
    }
    dist::destroy_process_group();
  });
}

}  // namespace
}  // namespace syncbn::train
