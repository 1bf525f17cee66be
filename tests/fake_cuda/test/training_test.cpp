// How often a training step exchanges and waits. The numbers are those of the present code: fewer
// are better, more need a reason.
#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>

#include "counts.h"
#include "dist/training.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using fake_cuda::Count;
using syncbn::test::run_ranks;

template <class Run>
fake_cuda::Counts counts_of(const Run& run) {
  const auto before = fake_cuda::counts();
  run();
  return fake_cuda::counts() - before;
}

// As PyTorch's SyncBatchNorm.
TEST(FakeTrainingTest, ASyncBatchNormLayerExchangesOnceForwardAndOnceBackward) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    dist::SyncBatchNorm layer(dist::SyncBatchNormOptions(3));
    layer->to(dist::device());
    const at::Tensor input = at::randn({4, 3, 5, 5}).to(dist::device()).requires_grad_();
    const at::Tensor gradient = at::ones_like(input);
    layer(input).backward(gradient);  // makes the group, and connects it
    at::Tensor output;
    const auto forward = counts_of([&] { output = layer(input); });
    const auto backward = counts_of([&] { output.backward(gradient); });
    EXPECT_EQ(forward[Count::kCollectives], 1U);
    EXPECT_EQ(backward[Count::kCollectives], 1U);
    // For the number of ranks with input, as PyTorch's.
    EXPECT_EQ(forward.host_waits(), 1U);
    EXPECT_EQ(backward.host_waits(), 0U);
  });
}

TEST(FakeTrainingTest, AStepOfDdpWaitsForNothingButBatchNorm) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 4, 3)),
                       dist::SyncBatchNorm(dist::SyncBatchNormOptions(4)));
    net->to(dist::device());
    dist::DistributedDataParallel<nn::SequentialImpl> ddp(net);
    const at::Tensor batch = at::randn({4, 3, 6, 6}).to(dist::device());
    const auto step = [&] {
      ddp(batch).pow(2).mean().backward();
      syncbn::test::sgd_step(*net);
    };
    // The reducer rebuilds its buckets after the first step, and libtorch's Logger waits for events
    // in the first ten and then in every hundredth.
    for (int i = 0; i < 12; ++i) step();
    for (int i = 0; i < 5; ++i) {
      const auto counts = counts_of(step);
      EXPECT_EQ(counts.host_waits(), 1U) << "step " << i;
      EXPECT_EQ(counts[Count::kDeviceToHost], 0U) << "step " << i;
    }
  });
}

}  // namespace
