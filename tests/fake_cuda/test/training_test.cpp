// How often a training step launches and waits. The numbers are those of the present code: fewer
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

struct Expected {
  uint64_t launches;     ///< kernels and ATen's operators
  uint64_t collectives;  ///< not among the launches
};

void expect_counts(const fake_cuda::Counts& counts, const Expected& expected) {
  EXPECT_EQ(counts[Count::kKernels] + counts[Count::kOperators], expected.launches);
  EXPECT_EQ(counts[Count::kCollectives], expected.collectives);
  EXPECT_EQ(counts.host_waits(), 0U);
  EXPECT_EQ(counts[Count::kDeviceToHost], 0U);
}

/// @param expected for a forward, and also for a backward
void expect_counts_of_layer(const dist::NcclOptions& nccl, const Expected& expected) {
  run_ranks(2, [&](int) {
    dist::init_process_group({.nccl = nccl});
    dist::SyncBatchNorm layer(dist::SyncBatchNormOptions(3).fuse_relu(true));
    layer->to(dist::device());
    const at::Tensor input = at::randn({4, 3, 5, 5}).to(dist::device()).requires_grad_();
    const at::Tensor gradient = at::ones_like(input);
    layer(input).backward(gradient);  // makes the group, and connects it
    // Without gradients, backward does not launch their accumulation.
    for (const at::Tensor& leaf : {input, layer->weight, layer->bias}) leaf.mutable_grad().reset();
    at::Tensor output;
    expect_counts(counts_of([&] { output = layer(input); }), expected);
    expect_counts(counts_of([&] { output.backward(gradient); }), expected);
  });
}

TEST(FakeTrainingTest, ASyncBatchNormLayerLaunchesAsOftenAsItSays) {
  expect_counts_of_layer({}, {.launches = 2, .collectives = 0});
  expect_counts_of_layer({.peer_memory = false}, {.launches = 2, .collectives = 1});
}

TEST(FakeTrainingTest, AStepOfDdpWaitsForNothing) {
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
      EXPECT_EQ(counts.host_waits(), 0U) << "step " << i;
      EXPECT_EQ(counts[Count::kDeviceToHost], 0U) << "step " << i;
    }
  });
}

}  // namespace
