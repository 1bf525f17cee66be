// SyncBatchNorm on a GPU against the CPU, in a world of one, and whether the host waits for the
// GPU. The tests with two GPUs are in gpu_test.cpp.

#include <gtest/gtest.h>
#include <syncbn/dist/batch_norm_statistics.h>
#include <syncbn/dist/checkpoint.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <functional>
#include <vector>

#include <ATen/ops/dropout.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include "dist/gpus.h"
#include "dist/group.h"
#include "dist/tensors.h"
#include "fake_cuda/counts.h"
#include "fake_cuda/nccl_settings.h"
#include "support/skip.h"

namespace {

namespace dist = syncbn::dist;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::gpus;
using syncbn::test::run_group;
using Tensors = std::vector<at::Tensor>;

/// Expects `run` to give the same for a layer and an input on the GPU as on the CPU.
void expect_as_on_cpu(const SyncBatchNormOptions& options, const at::Tensor& input,
                      const std::function<Tensors(SyncBatchNorm&, const at::Tensor&)>& run,
                      double tolerance = 1e-4) {
  const auto on = [&](at::Device device) {
    SyncBatchNorm layer(options);
    layer->to(device);
    // detach() first: on the CPU, to() returns `input` itself.
    Tensors results = run(layer, input.detach().to(device).requires_grad_());
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

TEST(GpuBatchNormTest, GradientsOfGradientsAreAsOnTheCpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(1, [](int) {
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
  run_group(1, [](int) {
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
  run_group(1, [](int) {
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

/// While this exists, libtorch throws where it makes the host wait for the GPU.
class NoWaiting {
 public:
  NoWaiting() { set(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoWaiting() { set(c10::cuda::SyncDebugMode::L_DISABLED); }
  NoWaiting(const NoWaiting&) = delete;
  NoWaiting& operator=(const NoWaiting&) = delete;

 private:
  static void set(c10::cuda::SyncDebugMode mode) {
    c10::cuda::warning_state().set_sync_debug_mode(mode);
  }
};

// Several ranks wait in each forward for the number of ranks with input, as PyTorch's do.
TEST(GpuBatchNormTest, AStepOfOneRankDoesNotWaitForTheGpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(1, [](int) {
    for (const bool fused : {false, true}) {
      SyncBatchNorm layer(SyncBatchNormOptions(3).fuse_relu(fused));
      layer->to(dist::device());
      const at::Tensor input = at::randn({4, 3, 5, 5}).to(dist::device()).requires_grad_();
      const at::Tensor residual = fused ? input.detach() : at::Tensor();
      const at::Tensor gradient = at::ones_like(input);
      layer(input, residual).backward(gradient);
      // Calls into libc10_cuda: without any such call, the linker would give NoWaiting its own copy
      // of the switch.
      c10::cuda::device_synchronize();
      const NoWaiting guard;
      const at::Tensor output = layer(input, residual);
      output.backward(gradient);
      EXPECT_THROW(output.max().item<float>(), c10::Error) << "a wait has to be noticed";
    }
  });
}

TEST(GpuLaunchesTest, OptionsReachNccl) {
  run_group(
      2, {.backend = "nccl", .nccl = {.min_ctas = 3, .max_ctas = 5, .blocking = false}}, [](int) {
        const fake_nccl::Settings settings = fake_nccl::settings();
        EXPECT_EQ(settings.blocking, 0);
        EXPECT_EQ(settings.min_ctas, 3);
        EXPECT_EQ(settings.max_ctas, 5);
        at::Tensor value = at::randn({3}, at::TensorOptions().device(dist::device()));
        dist::all_reduce(value);
        EXPECT_LT(fake_nccl::settings().priority, 0);  // high
        dist::all_reduce(value, c10d::ReduceOp::SUM,
                         dist::new_group({0, 1}, {}, dist::NcclOptions{.high_priority = false}));
        EXPECT_EQ(fake_nccl::settings().priority, 0);
        dist::destroy_process_group();
      });
}

/// @return number of buffers registered with NCCL
uint64_t registrations_of_training(bool register_buckets, Tensors& gradients) {
  const auto group = dist::new_group({0, 1}, std::nullopt,
                                     dist::NcclOptions{.register_buckets = register_buckets});
  const fake_cuda::Counts before = fake_cuda::counts();
  at::manual_seed(1);
  torch::nn::Linear net(4, 3);
  net->to(dist::device());
  dist::DistributedDataParallel<torch::nn::LinearImpl> ddp(
      net, dist::DdpOptions{.gradient_as_bucket_view = true, .process_group = group});
  for (int step = 0; step < 3; ++step) {
    ddp(at::ones({2, 4}, dist::device()) * (1 + dist::rank())).sum().backward();
  }
  for (const at::Tensor& parameter : net->parameters()) gradients.push_back(parameter.grad().cpu());
  return (fake_cuda::counts() - before)[fake_cuda::Count::kRegistrations];
}

TEST(GpuLaunchesTest, BucketsAreRegisteredWithNcclIfAsked) {
  run_group(2, {.backend = "nccl"}, [](int) {
    Tensors plain;
    EXPECT_EQ(registrations_of_training(false, plain), 0u);
    Tensors registered;
    EXPECT_GT(registrations_of_training(true, registered), 0u);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(registered.at(i).equal(plain[i])) << i;
    dist::destroy_process_group();
  });
}

}  // namespace
