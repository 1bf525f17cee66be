// SyncBatchNorm on a GPU against the same on the CPU, in a world of one; gpu_test.cpp has two GPUs.

#include <gtest/gtest.h>
#include <syncbn/dist/batch_norm_statistics.h>
#include <syncbn/dist/checkpoint.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <functional>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>

#include "dist/gpus.h"
#include "dist/tensors.h"
#include "support/multiproc.h"
#include "support/skip.h"

namespace {

namespace dist = syncbn::dist;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::gpus;
using syncbn::test::run_ranks;
using Tensors = std::vector<at::Tensor>;

/// What `run` gives for a layer and an input on the GPU is what it gives on the CPU.
void expect_as_on_cpu(const SyncBatchNormOptions& options, const at::Tensor& input,
                      const std::function<Tensors(SyncBatchNorm&, const at::Tensor&)>& run,
                      double tolerance = 1e-4) {
  const auto on = [&](at::Device device) {
    SyncBatchNorm layer(options);
    layer->to(device);
    Tensors results = run(layer, input.to(device).requires_grad_());
    for (const at::Tensor& buffer : layer->buffers()) results.push_back(buffer);
    return results;
  };
  const Tensors expected = on(at::kCPU);
  const Tensors actual = on(at::kCUDA);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(close(actual[i].cpu(), expected[i], tolerance, tolerance)) << "result " << i;
  }
}

Tensors forward_and_backward(SyncBatchNorm& layer, const at::Tensor& input) {
  const at::Tensor output = layer(input, input.detach() * 0.5);
  output.pow(2).sum().backward();
  return {output, input.grad(), layer->weight.grad(), layer->bias.grad()};
}

TEST(GpuBatchNormTest, ReluAndAdditionAreAsOnTheCpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    at::manual_seed(1);
    const at::Tensor input = at::randn({4, 3, 5, 5});
    for (const bool relu : {false, true}) {
      const auto options = SyncBatchNormOptions(3).fuse_relu(relu);
      expect_as_on_cpu(options, input, forward_and_backward);
      expect_as_on_cpu(options, input.contiguous(at::MemoryFormat::ChannelsLast),
                       forward_and_backward);
    }
  });
}

TEST(GpuBatchNormTest, LargeMeansAndTinyDeviationsAreAsOnTheCpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    at::manual_seed(1);
    const auto output = [](SyncBatchNorm& layer, const at::Tensor& input) {
      return Tensors{layer(input)};
    };
    const at::Tensor noise = at::randn({8, 3, 32, 32});
    expect_as_on_cpu(SyncBatchNormOptions(3), noise * 0.1 + 1e3, output, 2e-3);
    expect_as_on_cpu(SyncBatchNormOptions(3).eps(0), noise * 1e-6, output);
  });
}

TEST(GpuBatchNormTest, GradientsOfGradientsAreAsOnTheCpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    at::manual_seed(1);
    expect_as_on_cpu(
        SyncBatchNormOptions(3), at::randn({6, 3, 4}),
        [](SyncBatchNorm& layer, const at::Tensor& input) {
          const at::Tensor gradient =
              torch::autograd::grad({layer(input).pow(3).sum()}, {input}, {}, true, true)[0];
          return torch::autograd::grad({gradient.pow(2).sum()}, {input});
        },
        1e-3);
  });
}

TEST(GpuBatchNormTest, ACheckpointDropsTheSameAndUpdatesOnce) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(3);
    layer->to(at::kCUDA);
    const at::Tensor input = at::randn({64, 3}, at::kCUDA).requires_grad_();
    at::Tensor first;
    int runs = 0;
    const auto stretch = [&](const at::Tensor& x) {
      const at::Tensor kept = at::dropout(x, 0.5, true);
      if (++runs == 1) first = kept.detach();
      EXPECT_TRUE(kept.equal(first));
      return layer(kept);
    };
    dist::checkpoint(stretch, input).sum().backward();
    EXPECT_EQ(runs, 2);
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 1);
  });
}

TEST(GpuBatchNormTest, StatisticsOverSeveralBatchesAreAsOnTheCpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    at::manual_seed(1);
    expect_as_on_cpu(SyncBatchNormOptions(3), at::randn({9, 3}) + 2,
                     [](SyncBatchNorm& layer, const at::Tensor& input) {
                       const Tensors batches = input.split({2, 4, 3});
                       dist::update_bn_stats(
                           *layer, [&](int64_t i) { layer(batches[static_cast<size_t>(i)]); }, 3);
                       return Tensors{};
                     });
  });
}

}  // namespace
