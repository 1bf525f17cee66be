// Run on a machine with two GPUs: ctest -L gpu.
#include <gtest/gtest.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>

#include <ATen/ops/randn.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include "dist/gpus.h"
#include "dist/group.h"
#include "fake_cuda/counts.h"
#include "support/skip.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;

/// Waits for the current stream, but not for other streams.
void wait_for_computation() {
  const c10::impl::VirtualGuardImpl device(at::kCUDA);
  c10::Event computed(at::kCUDA);
  computed.record(device.getStream(dist::device()));
  computed.synchronize();
}

uint64_t collectives_of_nccl() {
  return fake_cuda::counts()[fake_cuda::Count::kCollectives];
}

/// Rank 1 begins its backward only when rank 0 has computed its own: if rank 0's backward waited
/// for its all-reduces, it would never end.
void expect_overlap(int rank) {
  const auto signals = dist::new_group({0, 1});
  nn::Sequential net(nn::Conv2d(3, 4, 3), nn::Conv2d(4, 4, 3), nn::Conv2d(4, 4, 3));
  net->to(dist::device());
  dist::DistributedDataParallel<nn::SequentialImpl> ddp(
      net, {.broadcast_buffers = false, .bucket_cap_mb = 1e-6});  // a bucket per parameter
  const at::Tensor input = at::randn({2, 3, 9, 9}, at::TensorOptions().device(dist::device()));
  // From the second step on, the buckets stay the same.
  for (int step = 0; step < 2; ++step) ddp(input).sum().backward();

  const at::Tensor loss = ddp(input).sum();
  const bool is_counted = fake_cuda::counters() != nullptr;
  const uint64_t before = is_counted ? collectives_of_nccl() : 0;
  bool was_called = false;
  // Called after the kernels of the first layer, the last ones of the backward, were launched.
  const auto on_last_gradient = [&](const at::Tensor& /*gradient*/) {
    was_called = true;
    if (is_counted) {
      EXPECT_EQ(collectives_of_nccl() - before, 4U) << "the weights and biases of two layers";
    }
    if (rank == 1) return;
    wait_for_computation();
    dist::barrier(signals);
  };
  net->parameters().front().register_hook(on_last_gradient);
  if (rank == 1) dist::barrier(signals);
  loss.backward();
  EXPECT_TRUE(was_called);
  dist::destroy_process_group();
}

TEST(GpuDdpOverlapTest, BucketsAreExchangedWhileBackwardGoesOn) {
  SYNCBN_SKIP_UNLESS(syncbn::test::gpus() > 1, "two-gpus");
  syncbn::test::run_group(2, expect_overlap);
}

}  // namespace
