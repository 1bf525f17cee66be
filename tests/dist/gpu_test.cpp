// Run on a machine with a GPU: ctest -L gpu.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/base/flight_record.h>
#include <syncbn/base/gpus.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/comm_hooks.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <array>
#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "dist/gpus.h"
#include "dist/group.h"
#include "dist/tensors.h"
#include "dist/training.h"
#include "fake_cuda/counts.h"
#include "groups/world.h"
#include "support/environment_guard.h"
#include "support/multiproc.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"
#include "transport/backend.h"

namespace {

namespace dist = syncbn::dist;
using syncbn::test::close;
using syncbn::test::gpus;
using syncbn::test::message_of;
using syncbn::test::run_group;
using syncbn::test::run_ranks;

TEST(GpuTest, AutoChoosesNcclAndTheDeviceOfTheLocalRank) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(1, [](int) {
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

/// A training that runs on CPUs and on GPUs, to compare the results.
struct Recipe {
  const char* name;
  dist::DdpOptions options = {};
  std::function<dist::CommHook()> hook = {};
  bool accumulates = false;  ///< two backward passes per step
  double tolerance = 1e-4;
};

/// Trains convolution and SyncBatchNorm for five steps on this rank's uneven part of each batch,
/// and returns the parameters and buffers. The batches are on the CPU: DDP moves them to the
/// module's device.
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

/// Call this on both of two ranks.
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
  run_group(2, [](int) {
    for (const Recipe& recipe : recipes()) expect_trains_as_on_cpus(recipe, dist::device());
  });
}

// NCCL allows one rank per GPU. Gloo copies through host memory, and allows any number.
TEST(GpuTest, TwoRanksThatShareAGpuTrainTheSameOverGlooAsOnTwoCpus) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(2, {.backend = "gloo"}, [](int) {
    for (const Recipe& recipe : recipes()) expect_trains_as_on_cpus(recipe, {at::kCUDA, 0});
  });
}

/// Rank 1 has three steps more than rank 0. The reduction of a bucket starts between the exchanges
/// of statistics of the two layers.
void expect_joins_as_on_cpus(at::Device device, bool static_graph = false) {
  const auto train_unevenly = [static_graph](at::Device on) {
    at::manual_seed(0);
    torch::nn::Sequential net(
        torch::nn::Linear(3, 4), dist::SyncBatchNorm(dist::SyncBatchNormOptions(4)),
        torch::nn::Linear(4, 4), dist::SyncBatchNorm(dist::SyncBatchNormOptions(4)));
    net->to(on);
    dist::DistributedDataParallel<torch::nn::SequentialImpl> ddp(
        net, {.static_graph = static_graph, .bucket_cap_mb = 1e-5});
    const auto guard = ddp.join();
    for (int step = 0; step < 2 + 3 * dist::rank(); ++step) {
      ddp(at::randn({5, 3})).pow(2).mean().backward();
      syncbn::test::sgd_step(*net);
    }
    return net->parameters();
  };
  const Tensors expected = train_unevenly(at::kCPU);
  const Tensors actual = train_unevenly(device);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(close(actual[i].cpu(), expected[i], 1e-4, 1e-4)) << i;
  }
}

TEST(GpuTest, ARankThatRunsOutOfInputJoinsTheOtherOnAGpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(2, {.backend = "gloo"}, [](int) { expect_joins_as_on_cpus({at::kCUDA, 0}); });
}

TEST(GpuTest, ARankThatRunsOutOfInputJoinsTheOtherOverNccl) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_group(2, {.timeout = std::chrono::seconds(60)}, [](int) {
    for (const bool static_graph : {false, true}) {
      expect_joins_as_on_cpus(dist::device(), static_graph);
    }
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
  run_group(2, {.backend = "gloo"}, [](int) { expect_collectives({at::kCUDA, 0}); });
}

// Comparing split sizes, as on CPUs, would make the host wait for other ranks.
TEST(GpuTest, AllToAllOverNcclIsOneCall) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(1, {.backend = "nccl"}, [](int) {
    const auto& backend = *dist::detail::backend_of(dist::default_group());
    const at::Tensor part = at::ones({3}, at::TensorOptions().device(dist::device()));
    Tensors received{at::zeros_like(part)};
    const uint64_t before = backend.sequence();
    dist::all_to_all(received, {part});
    EXPECT_EQ(backend.sequence(), before + 1);
    EXPECT_TRUE(received[0].equal(part));
    dist::destroy_process_group();
  });
}

TEST(GpuTest, CollectivesTakeTensorsOnAGpuOverNccl) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(1, {.backend = "nccl"}, [](int) {
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

/// Two halves on two devices, each with a convolution and SyncBatchNorm.
struct TwoDevicesImpl : torch::nn::Module {
  explicit TwoDevicesImpl(std::vector<at::Device> devices) : devices(std::move(devices)) {
    for (size_t i = 0; i < 2; ++i) {
      halves.push_back(register_module(
          i == 0 ? "front" : "back",
          torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 3, 3).padding(1)),
                                dist::SyncBatchNorm(dist::SyncBatchNormOptions(3)))));
    }
    for (size_t i = 0; i < 2; ++i) halves[i]->to(this->devices[i]);
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = input;
    for (size_t i = 0; i < 2; ++i) x = halves[i]->forward(x.to(devices[i])).relu();
    return x;
  }
  const std::vector<at::Device> devices;
  std::vector<torch::nn::Sequential> halves;
};

/// Rank 1 has more batches than rank 0.
Tensors train_unevenly(const std::vector<at::Device>& devices) {
  at::manual_seed(0);
  const auto net = std::make_shared<TwoDevicesImpl>(devices);
  dist::DistributedDataParallel<TwoDevicesImpl> ddp(net);
  {
    const auto guard = ddp.join();
    for (int step = 0; step < 2 + 2 * dist::rank(); ++step) {
      ddp(at::randn({2, 3, 4, 4})).pow(2).mean().backward();
      syncbn::test::sgd_step(*net);
    }
  }
  Tensors all = net->parameters();
  for (const at::Tensor& buffer : net->buffers()) all.push_back(buffer);
  return all;
}

TEST(GpuTest, AModuleOnTwoGpusOfARankTrainsAsOnTheCpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_group(2, {.backend = "cuda:gloo"}, [](int) {
    const Tensors expected = train_unevenly({at::kCPU, at::kCPU});
    const Tensors actual = train_unevenly({{at::kCUDA, 0}, {at::kCUDA, 1}});
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close(actual[i].cpu(), expected[i], 1e-4, 1e-4)) << i;
    }
  });
}

// A context takes half a gigabyte, and all ranks of a host would have one on the first GPU.
TEST(GpuTest, ARankHasNoContextOnTheGpuOfAnother) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_group(2, {.backend = "nccl"}, [](int rank) {
    at::Tensor value = at::ones({3}, at::TensorOptions().device(dist::device()));
    // The monitor checks every 250 ms whether a call is complete.
    if (rank == 0) std::this_thread::sleep_for(std::chrono::seconds(1));
    dist::all_reduce(value);
    EXPECT_EQ(value[0].item<float>(), 2);
    EXPECT_TRUE(c10::cuda::hasPrimaryContext(static_cast<at::DeviceIndex>(rank)));
    EXPECT_FALSE(c10::cuda::hasPrimaryContext(static_cast<at::DeviceIndex>(1 - rank)));
    dist::destroy_process_group();
  });
}

TEST(GpuTest, AsynchronousCallsReadWhatTheCallersStreamWrites) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(1, {.backend = "nccl"}, [](int) {
    const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
    const c10::StreamGuard guard(cuda.getStreamFromGlobalPool(dist::device()));
    for (int i = 0; i < 20; ++i) {
      at::Tensor value = at::zeros({1 << 20}, at::TensorOptions().device(dist::device()));
      for (int j = 0; j < 20; ++j) value += i;  // still runs when the call starts
      Tensors received{at::zeros_like(value)};
      dist::all_to_all_async(received, {value})->wait();
      EXPECT_EQ(received[0].amin().item<float>(), 20 * i);
    }
    dist::destroy_process_group();
  });
}

// Most programs begin with a seed, after which libtorch remembers that it found no CUDA.
TEST(GpuTest, ASeedBeforeTheProcessGroupIsRefusedWithAdvice) {
  // Before gpus(), which loads libtorch's CUDA part.
  const auto results = syncbn::test::run_ranks_and_collect({.world_size = 1}, [](int) {
    at::manual_seed(1);
    EXPECT_THAT(message_of<syncbn::base::UserError>([] { dist::init_process_group(); }),
                ::testing::HasSubstr("init_process_group() before at::manual_seed()"));
    dist::init_process_group({.backend = "gloo"});
  });
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  EXPECT_EQ(results[0].exit_code, 0) << results[0].output;
}

TEST(GpuTest, AProcessThatSeesOneGpuUsesIt) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    // As under srun --gpus-per-task=1.
    ::setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    ::setenv("LOCAL_RANK", "3", 1);
    dist::init_process_group({.backend = "nccl"});
    EXPECT_EQ(dist::device(), at::Device(at::kCUDA, 0));
  });
}

/// Runs two ranks that see one GPU each, as number 0.
void run_ranks_that_see(const std::array<const char*, 2>& gpus, const std::function<void()>& body) {
  run_ranks(2, [&](int rank) {
    ::setenv("CUDA_VISIBLE_DEVICES", gpus.at(static_cast<size_t>(rank)), 1);
    body();
  });
}

TEST(GpuTest, RanksThatSeeOneGpuEachExchangeAsOthers) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks_that_see({"0", "1"}, [] {
    dist::init_process_group({.backend = "nccl"});
    EXPECT_EQ(dist::device(), at::Device(at::kCUDA, 0));
    const auto on_gpu = at::TensorOptions().device(dist::device());
    at::Tensor value = at::ones({3}, on_gpu) * (dist::rank() + 1);
    dist::all_reduce(value);
    EXPECT_EQ(value[0].item<float>(), 3);
    dist::SyncBatchNorm layer(dist::SyncBatchNormOptions(1).affine(false));
    layer->to(dist::device());
    // The inputs are 1 and 3, so the mean over both ranks is 2 and the deviation 1.
    const at::Tensor output = layer(at::full({4, 1}, 1. + 2 * dist::rank(), on_gpu));
    EXPECT_TRUE(close(output.cpu(), at::full({4, 1}, 2. * dist::rank() - 1), 1e-4, 1e-4));
    dist::destroy_process_group();
  });
}

TEST(GpuTest, RanksThatSeeTheSameGpuAreRefusedByItsAddress) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks_that_see({"0", "0"}, [] {
    EXPECT_THAT(
        message_of<syncbn::base::UserError>([] { dist::init_process_group({.backend = "nccl"}); }),
        ::testing::HasSubstr("share the GPU"));
  });
}

// Loading CUDA's libraries takes seconds.
TEST(GpuTest, AGroupOverGlooLoadsNothingOfCuda) {
  SYNCBN_SKIP_UNLESS(syncbn::base::count_gpus() > 0, "gpu");
  run_ranks(2, [](int) {
    const auto loaded = [](const std::string& backend) {
      dist::init_process_group({.backend = backend});
      at::Tensor value = at::ones({3});
      dist::all_reduce(value);
      dist::SyncBatchNorm layer(3);
      layer(at::ones({2, 3}));
      dist::destroy_process_group();
      std::ifstream maps("/proc/self/maps");
      return std::string(std::istreambuf_iterator<char>(maps), {});
    };
    for (const char* library : {"libtorch_cuda.so", "libsyncbn_dist_cuda.so"}) {
      EXPECT_THAT(loaded("gloo"), ::testing::Not(::testing::HasSubstr(library)));
    }
    EXPECT_THAT(loaded("cuda:gloo"), ::testing::HasSubstr("libtorch_cuda.so"));
  });
}

// A world of one has no monitor, like groups with Python ranks.
TEST(GpuTest, WithoutAMonitorACallCountsAsEndedOnceItIsQueued) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  const syncbn::test::TempFolder folder;
  const syncbn::test::Environment recorded("SYNCBN_FLIGHT_FOLDER", folder.path().string());
  run_group(1, {.backend = "nccl"}, [](int) {
    at::Tensor value = at::ones({3}, at::TensorOptions().device(dist::device()));
    for (int i = 0; i < 3; ++i) dist::all_reduce(value);
    dist::destroy_process_group();
  });
  using syncbn::base::FlightLayout;
  const auto record = std::make_unique<FlightLayout>();
  std::ifstream(folder / "rank-0.flight")
      .read(reinterpret_cast<char*>(record.get()), sizeof(*record));
  for (size_t n = 1; n <= 3; ++n) {
    EXPECT_EQ(record->calls[n].number, n);
    EXPECT_EQ(record->calls[n].state, FlightLayout::kSucceeded);
  }
}

TEST(GpuTest, VersionsThatDoNotFitAreRefusedAndWithAutoWarnedOf) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  SYNCBN_SKIP_UNLESS(fake_cuda::counters() != nullptr, "fake-cuda");
  struct Case {
    const char* variable;
    const char* version;
    const char* what;
    const char* found;
  };
  for (const auto& [variable, version, what, found] :
       {Case{"FAKE_NCCL_VERSION", "22703", "versions of NCCL do not fit", "was loaded is 2.27.3;"},
        Case{"FAKE_CUDA_VERSION", "11080", "versions of CUDA do not fit", "was loaded is 11.8;"},
        Case{"FAKE_CUDA_DRIVER", "11080", "CUDA does not start", "the driver knows CUDA 11.8"}}) {
    const syncbn::test::Environment other(variable, version);
    const auto says = ::testing::AllOf(::testing::HasSubstr(what), ::testing::HasSubstr(found));
    const auto results = syncbn::test::run_ranks_and_collect({.world_size = 1}, [&](int) {
      EXPECT_THAT(message_of<syncbn::base::UserError>(
                      [] { dist::init_process_group({.backend = "nccl"}); }),
                  says);
      dist::init_process_group();
      EXPECT_EQ(dist::device(), at::Device(at::kCPU));
    });
    EXPECT_EQ(results[0].exit_code, 0) << results[0].output;
    EXPECT_THAT(results[0].output,
                ::testing::AllOf(::testing::HasSubstr("leaves the GPUs unused"), says));
  }
}

TEST(GpuTest, GroupsOfAllRanksSplitTheDefaultGroupsCommunicator) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_group(2, {.backend = "nccl", .nccl = {.max_ctas = 8}}, [](int rank) {
    at::Tensor value = at::ones({3}, at::TensorOptions().device(dist::device()));
    const auto work = dist::all_reduce_async(value);  // runs while the group is split
    const auto reversed = dist::new_group({1, 0}, {}, dist::NcclOptions{.blocking = false});
    work->wait();
    value.mul_(rank + 1);
    dist::broadcast(value, 0, reversed);
    EXPECT_EQ(value.sum().item<float>(), 3 * 2 * 2);  // the values of rank 1
    const auto alone = dist::new_subgroups(1);
    dist::all_reduce(value, c10d::ReduceOp::SUM, alone);
    EXPECT_EQ(value.sum().item<float>(), 3 * 2 * 2);
    dist::SyncBatchNorm norm(3);
    norm->to(dist::device());
    norm(at::ones({2, 3}, value.options()));
    if (fake_cuda::counters() != nullptr) {
      EXPECT_EQ(fake_cuda::counts()[fake_cuda::Count::kSplits], 2U);
    }
    dist::destroy_process_group();
  });
}

TEST(GpuTest, MoreRanksThanGpusTrainOnCpusOrShareThem) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  const int ranks = gpus() + 1;
  const auto results = syncbn::test::run_group_and_collect(ranks, [](int) {
    EXPECT_EQ(dist::device(), at::Device(at::kCPU));
    dist::destroy_process_group();
    dist::init_process_group({.backend = "cuda:gloo"});
    EXPECT_EQ(dist::device().type(), at::kCUDA);
    at::Tensor one = at::ones({1}, at::TensorOptions().device(dist::device()));
    dist::all_reduce(one);
    EXPECT_EQ(one.item<float>(), static_cast<float>(dist::world_size()));
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(results[0].output, ::testing::HasSubstr("leaves the GPUs unused"));
  for (size_t i = 1; i < results.size(); ++i) EXPECT_EQ(results[i].output, "");
}

TEST(GpuTest, AModuleOnTwoKindsOfDevicesIsRefused) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_group(1, [](int) {
    torch::nn::Linear on_gpu(2, 2);
    on_gpu->to(dist::device());
    torch::nn::Sequential net(torch::nn::Linear(2, 2), on_gpu);
    EXPECT_THAT(message_of<syncbn::base::UserError>(
                    [&] { dist::DistributedDataParallel<torch::nn::SequentialImpl> ddp(net); }),
                ::testing::HasSubstr("cuda:0"));
  });
}

}  // namespace
