// Run on a machine with a GPU: ctest -L gpu. The kernels are compared with the CPU's, which other
// tests compare with float64 references.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/comm_hooks.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "batch_norm/batch_norm_kernels.h"
#include "dist/gpus.h"
#include "dist/tensors.h"
#include "dist/training.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using dist::detail::batch_norm_kernels;
using dist::detail::BatchNormKernels;
using dist::detail::OutputGradient;
using syncbn::test::close;
using syncbn::test::gpus;
using syncbn::test::message_of;
using syncbn::test::run_ranks;

struct KernelCase {
  std::vector<int64_t> sizes;
  at::ScalarType type;
  bool channels_last;
  double tolerance;
};

/// With a momentum, and with the mean of all batches.
/// @param counter Module::to(dtype) makes it a floating-point number.
void expect_running_statistics_agree(const dist::detail::MergedMoments& moments,
                                     const dist::detail::MergedMoments& on_gpu,
                                     at::ScalarType counter) {
  for (const std::optional<double> momentum : {std::optional(0.1), std::optional<double>()}) {
    const auto updated = [&](at::DeviceType device, const auto& batch) {
      const auto options = at::TensorOptions().device(device);
      const dist::detail::RunningStatistics running{
          .mean = at::zeros({batch.mean.size(0)}, options),
          .var = at::ones({batch.mean.size(0)}, options),
          .num_batches_tracked = at::full({}, 2, options.dtype(counter)),
          .momentum = momentum};
      batch_norm_kernels(device).update_running(running, batch);
      EXPECT_EQ(running.num_batches_tracked.template item<int64_t>(), 3);
      return at::stack({running.mean, running.var}).cpu();
    };
    EXPECT_TRUE(close(updated(at::kCUDA, on_gpu), updated(at::kCPU, moments), 1e-5, 1e-6));
  }
}

void expect_kernels_agree(const KernelCase& c) {
  const BatchNormKernels& cpu = batch_norm_kernels(at::kCPU);
  const BatchNormKernels& cuda = batch_norm_kernels(at::kCUDA);
  at::manual_seed(1);
  at::Tensor x = (at::randn(c.sizes) * 3 + 1).to(c.type);
  at::Tensor dy = at::randn(c.sizes).to(c.type);
  if (c.channels_last) {
    x = x.contiguous(at::MemoryFormat::ChannelsLast);
    dy = dy.contiguous(at::MemoryFormat::ChannelsLast);
  }
  const int64_t channels = c.sizes[1];
  const at::Tensor weight = at::randn({channels});
  const at::Tensor bias = at::randn({channels});
  const auto on_gpu = [](const at::Tensor& t) { return t.to(at::kCUDA); };

  const at::Tensor row = cpu.moments(x);
  const at::Tensor row_on_gpu = cuda.moments(on_gpu(x)).cpu();
  // Of statistics mean and m2, of a backward the sums of dy and of dy * (x - mean).
  const auto first = [&](const at::Tensor& of) { return of.narrow(0, 0, channels); };
  const auto second = [&](const at::Tensor& of) { return of.narrow(0, channels, channels); };
  EXPECT_TRUE(close(first(row_on_gpu), first(row), 1e-4, 1e-5));
  EXPECT_TRUE(close(second(row_on_gpu), second(row), 1e-4, 1e-3));
  EXPECT_EQ(row_on_gpu[-1].item<double>(), static_cast<double>(x.numel() / channels));

  const at::Tensor empty = at::zeros_like(row);
  at::Tensor other = row.clone();  // of as many values, so that counts stay whole numbers
  other.narrow(0, 0, 2 * channels).add_(0.25);
  const at::Tensor gathered = at::stack({row, empty, other});
  const auto merged = cpu.merge(gathered, channels);
  const auto merged_on_gpu = cuda.merge(on_gpu(gathered), channels);
  EXPECT_TRUE(close(merged_on_gpu.mean.cpu(), merged.mean, 1e-12, 1e-12));
  EXPECT_TRUE(close(merged_on_gpu.m2.cpu(), merged.m2, 1e-12, 1e-12));
  EXPECT_TRUE(close(merged_on_gpu.count.cpu(), merged.count, 0, 0));

  const at::Tensor invstd = cpu.inverse_deviation(merged, 1e-5);
  EXPECT_TRUE(close(cuda.inverse_deviation(merged_on_gpu, 1e-5).cpu(), invstd, 1e-12, 1e-12));
  for (const at::ScalarType counter : {at::kLong, at::kFloat, at::kDouble}) {
    expect_running_statistics_agree(merged, merged_on_gpu, counter);
  }
  const auto output =
      cpu.transform(x, weight, bias, merged.mean, invstd, {.residual = dy, .relu = true});
  const auto output_on_gpu =
      cuda.transform(on_gpu(x), on_gpu(weight), on_gpu(bias), on_gpu(merged.mean), on_gpu(invstd),
                     {.residual = on_gpu(dy), .relu = true});
  EXPECT_TRUE(close(output_on_gpu.values.cpu(), output.values, c.tolerance, c.tolerance));

  // Both masks are made from the CPU's output: rounding near 0 could make them differ.
  OutputGradient gradient{dy, output.relu_mask};
  const auto sums = cpu.backward_reduce(gradient, x, merged.mean, invstd);
  OutputGradient gradient_on_gpu{on_gpu(dy), on_gpu(output.values)};
  EXPECT_TRUE(close(cuda.apply_relu_mask(gradient_on_gpu, on_gpu(x)).cpu(),
                    cpu.apply_relu_mask(gradient, x), 0, 0));
  const auto sums_on_gpu =
      cuda.backward_reduce(gradient_on_gpu, on_gpu(x), on_gpu(merged.mean), on_gpu(invstd));
  EXPECT_TRUE(close(first(sums_on_gpu).cpu(), first(sums), 1e-3, 1e-2));
  EXPECT_TRUE(close(second(sums_on_gpu).cpu(), second(sums), 1e-3, 5e-2));
  const auto parameters = cpu.parameter_gradients(sums, invstd, at::kFloat);
  const auto parameters_on_gpu = cuda.parameter_gradients(on_gpu(sums), on_gpu(invstd), at::kFloat);
  EXPECT_TRUE(close(parameters_on_gpu.weight.cpu(), parameters.weight, 1e-6, 1e-6));
  EXPECT_TRUE(close(parameters_on_gpu.bias.cpu(), parameters.bias, 1e-6, 1e-6));
  EXPECT_TRUE(close(
      cuda.backward_elementwise(gradient_on_gpu, on_gpu(x), on_gpu(weight), on_gpu(merged.mean),
                                on_gpu(invstd), on_gpu(sums), on_gpu(merged.count),
                                /*keep=*/true)
          .cpu(),
      cpu.backward_elementwise(gradient, x, weight, merged.mean, invstd, sums, merged.count,
                               /*keep=*/true),
      c.tolerance, c.tolerance));
  EXPECT_TRUE(close(gradient_on_gpu.values.cpu(), gradient.values, 0, 0));
}

TEST(GpuTest, KernelsAgreeWithTheCpus) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    expect_kernels_agree({{8, 6, 20, 30}, at::kFloat, false, 1e-4});
    expect_kernels_agree({{8, 6, 20, 30}, at::kFloat, true, 1e-4});
    expect_kernels_agree({{8, 6, 20, 30}, at::kHalf, false, 1e-2});
    expect_kernels_agree({{8, 6, 20, 30}, at::kBFloat16, false, 5e-2});
    expect_kernels_agree({{16, 7}, at::kFloat, false, 1e-4});
    expect_kernels_agree({{4, 7, 33}, at::kFloat, false, 1e-4});
  });
}

TEST(GpuTest, AutoChoosesNcclAndTheDeviceOfTheLocalRank) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    EXPECT_EQ(dist::device(), at::Device(at::kCUDA, 0));
    at::Tensor tensor = at::full({3}, 2.0, at::TensorOptions().device(dist::device()));
    dist::all_reduce(tensor);
    EXPECT_TRUE(tensor.cpu().equal(at::full({3}, 2.0)));
    at::Tensor on_cpu = at::full({3}, 2.0);
    dist::all_reduce(on_cpu);
    dist::barrier();
  });
}

using Tensors = std::vector<at::Tensor>;

/// What is trained with on CPUs and on GPUs, for the two to be compared.
struct Recipe {
  const char* name;
  dist::DdpOptions options = {};
  std::function<dist::CommHook()> hook = {};
  bool accumulates = false;  ///< two backward passes a step
  double tolerance = 1e-4;
};

/// Convolution and SyncBatchNorm, five steps on this rank's uneven part of each batch; returns
/// parameters and buffers. Batches lie on the CPU: DDP moves them to the module's device.
Tensors train(const Recipe& recipe, at::Device device) {
  namespace nn = torch::nn;
  const int rank = dist::rank();
  at::manual_seed(0);
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 4, 3)),
                     dist::SyncBatchNorm(dist::SyncBatchNormOptions(4)));
  net->to(device);
  dist::DistributedDataParallel<nn::SequentialImpl> ddp(net, recipe.options);
  if (recipe.hook) ddp.register_comm_hook(recipe.hook());
  const auto backward = [&] {
    const at::Tensor batch = at::randn({8, 3, 6, 6}).narrow(0, 4 * rank, 3 + rank);
    const at::Tensor output = ddp(batch);
    EXPECT_EQ(output.device(), device);
    output.pow(3).mean().backward();
  };
  for (int step = 0; step < 5; ++step) {
    if (recipe.accumulates) {
      const auto guard = ddp.no_sync();
      backward();
    }
    backward();
    syncbn::test::sgd_step(*net);
  }
  Tensors all = net->parameters();
  for (const at::Tensor& buffer : net->buffers()) all.push_back(buffer);
  return all;
}

/// On every rank of two.
void expect_trains_as_on_cpus(const Recipe& recipe, at::Device device) {
  SCOPED_TRACE(recipe.name);
  const Tensors expected = train(recipe, at::kCPU);
  const Tensors actual = train(recipe, device);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(close(actual[i].cpu(), expected[i], recipe.tolerance, recipe.tolerance)) << i;
  }
}

std::vector<Recipe> recipes() {
  return {
      {"defaults"},
      {"gradient_as_bucket_view", {.gradient_as_bucket_view = true}},
      {"find_unused_parameters", {.find_unused_parameters = true}},
      {"static_graph", {.static_graph = true}},
      {"small buckets", {.bucket_cap_mb = 0.0001}},
      {.name = "no_sync", .accumulates = true},
      {.name = "allreduce_hook", .hook = [] { return dist::allreduce_hook(); }},
      {.name = "fp16_compress_hook",
       .hook = [] { return dist::fp16_compress_hook(); },
       .tolerance = 5e-3},
      {.name = "bf16_compress_hook",
       .hook = [] { return dist::bf16_compress_hook(); },
       .tolerance = 5e-2},
      {.name = "power_sgd_hook",
       .hook = [] { return dist::power_sgd_hook({.start_power_sgd_iter = 2}); },
       .tolerance = 1e-3},
  };
}

TEST(GpuTest, DdpAndSyncBatchNormTrainTheSameOnTwoGpusAsOnTwoCpus) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks(2, [](int) {
    dist::init_process_group();
    for (const Recipe& recipe : recipes()) expect_trains_as_on_cpus(recipe, dist::device());
  });
}

// NCCL takes one rank a GPU; Gloo copies by way of the host, and takes any number.
TEST(GpuTest, TwoRanksThatShareAGpuTrainTheSameOverGlooAsOnTwoCpus) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(2, [](int) {
    dist::init_process_group({.backend = "gloo"});
    for (const Recipe& recipe : recipes()) expect_trains_as_on_cpus(recipe, {at::kCUDA, 0});
  });
}

TEST(GpuTest, ARankThatRunsOutOfInputJoinsTheOtherOnAGpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(2, [](int rank) {
    dist::init_process_group({.backend = "gloo"});
    const auto train_unevenly = [&](at::Device device) {
      at::manual_seed(0);
      torch::nn::Sequential net(torch::nn::Linear(3, 4),
                                dist::SyncBatchNorm(dist::SyncBatchNormOptions(4)));
      net->to(device);
      dist::DistributedDataParallel<torch::nn::SequentialImpl> ddp(net);
      const auto guard = ddp.join();
      for (int step = 0; step < 2 + 3 * rank; ++step) {
        ddp(at::randn({5, 3})).pow(2).mean().backward();
        syncbn::test::sgd_step(*net);
      }
      return net->parameters();
    };
    const Tensors expected = train_unevenly(at::kCPU);
    const Tensors actual = train_unevenly({at::kCUDA, 0});
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close(actual[i].cpu(), expected[i], 1e-4, 1e-4)) << i;
    }
  });
}

// Over Gloo, where all ranks wait for each other's headers.
TEST(GpuTest, RanksInDifferentLayersOnAGpuLearnOfIt) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(2, [](int rank) {
    dist::init_process_group({.backend = "gloo"});
    const auto layer = [](const char* name) {
      dist::SyncBatchNorm made(dist::SyncBatchNormOptions(3).name(name));
      made->to(at::kCUDA);
      return made;
    };
    auto first = layer("first");
    auto second = layer("second");
    const at::Tensor batch = at::randn({4, 3}, at::kCUDA);
    second(first(batch));
    EXPECT_THAT(
        message_of<syncbn::base::UserError>([&] { rank == 0 ? first(batch) : second(batch); }),
        ::testing::AllOf(::testing::HasSubstr("rank 0 in layer 'first' (3 channels"),
                         ::testing::HasSubstr("rank 1 in layer 'second' (3 channels")));
  });
}

void expect_collectives(at::Device device) {
  const int rank = dist::rank();
  const int size = dist::world_size();
  const auto of = [device](double value) {
    return at::full({3}, value, at::TensorOptions().device(device));
  };
  const auto holds = [](const at::Tensor& tensor, double value) {
    return tensor.cpu().equal(at::full({3}, value));
  };
  at::Tensor sum = of(rank + 1);
  dist::all_reduce(sum);
  EXPECT_TRUE(holds(sum, size * (size + 1) / 2.0));
  at::Tensor sent = of(rank);
  dist::broadcast(sent, size - 1);
  EXPECT_TRUE(holds(sent, size - 1));
  const Tensors gathered = dist::all_gather(of(10 * rank));
  for (int peer = 0; peer < size; ++peer) {
    EXPECT_TRUE(holds(gathered[static_cast<size_t>(peer)], 10 * peer));
  }
  EXPECT_EQ(dist::all_gather_bytes(fmt::format("r{}", rank)).back(), fmt::format("r{}", size - 1));
  dist::barrier();
}

TEST(GpuTest, CollectivesTakeTensorsOfTwoRanksOnOneGpuOverGloo) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(2, [](int) {
    dist::init_process_group({.backend = "gloo"});
    expect_collectives({at::kCUDA, 0});
  });
}

TEST(GpuTest, CollectivesTakeTensorsOnAGpuOverNccl) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group({.backend = "nccl"});
    expect_collectives(dist::device());
    at::Tensor part = at::zeros({3}, at::TensorOptions().device(dist::device()));
    dist::reduce_scatter(part, {at::ones_like(part)});
    EXPECT_TRUE(part.cpu().equal(at::ones({3})));
    Tensors received{at::zeros_like(part)};
    dist::all_to_all(received, {part});
    EXPECT_TRUE(received[0].equal(part));
    const auto group = dist::new_group({0});
    at::Tensor sum = at::ones_like(part);
    dist::all_reduce(sum, c10d::ReduceOp::AVG, group);
    EXPECT_TRUE(sum.equal(part));
    expect_trains_as_on_cpus({.name = "a world of one"}, dist::device());
    dist::destroy_process_group();
  });
}

TEST(GpuTest, AModuleOnTwoKindsOfDevicesIsRefused) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    torch::nn::Linear on_gpu(2, 2);
    on_gpu->to(dist::device());
    torch::nn::Sequential net(torch::nn::Linear(2, 2), on_gpu);
    EXPECT_THAT(message_of<syncbn::base::UserError>(
                    [&] { dist::DistributedDataParallel<torch::nn::SequentialImpl> ddp(net); }),
                ::testing::HasSubstr("cuda:0"));
  });
}

}  // namespace
