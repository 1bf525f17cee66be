// SyncBatchNorm on a GPU against the CPU, in a world of one, and whether the host waits for the
// GPU. The tests with two GPUs are in gpu_test.cpp.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <syncbn/dist/batch_norm_statistics.h>
#include <syncbn/dist/checkpoint.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <functional>
#include <optional>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "dist/device.h"
#include "dist/gpus.h"
#include "dist/tensors.h"
#include "fake_cuda/counts.h"
#include "fake_cuda/nccl_settings.h"
#include "groups/world.h"
#include "support/environment_guard.h"
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

void expect_steps_without_waiting(const std::function<at::Tensor(const at::Tensor&)>& forward) {
  const uint64_t expected = dist::world_size() > 1 ? 1 : 0;
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const at::Tensor input =
        at::randn({4, 3, 5, 5}).to(dist::device()).contiguous(format).requires_grad_();
    const at::Tensor gradient = at::ones_like(input);
    forward(input).backward(gradient);  // creates the group and connects it
    // Calls into libc10_cuda: without any such call, the linker would give NoWaiting its own copy
    // of the switch.
    c10::cuda::device_synchronize();
    for (int step = 0; step < 5; ++step) {
      const NoWaiting guard;
      uint64_t before = syncbn::test::exchanges({}, dist::device());
      const at::Tensor output = forward(input);
      EXPECT_EQ(syncbn::test::exchanges({}, dist::device()) - before, expected)
          << "forward of step " << step;
      before = syncbn::test::exchanges({}, dist::device());
      output.backward(gradient);
      EXPECT_EQ(syncbn::test::exchanges({}, dist::device()) - before, expected)
          << "backward of step " << step;
      EXPECT_THROW(output.max().item<float>(), c10::Error) << "a wait has to be noticed";
    }
  }
}

void expect_layers_do_not_wait() {
  for (const bool fused : {false, true}) {
    for (const auto momentum : {std::optional(0.1), std::optional<double>()}) {
      SyncBatchNorm layer(SyncBatchNormOptions(3).momentum(momentum).fuse_relu(fused));
      layer->to(dist::device());
      expect_steps_without_waiting(
          [&](const at::Tensor& x) { return layer(x, fused ? x.detach() : at::Tensor()); });
    }
  }
  torch::nn::BatchNorm2d converted(3);
  converted->to(dist::device());
  dist::convert_sync_batchnorm(*converted);
  expect_steps_without_waiting([&](const at::Tensor& x) { return converted(x); });
}

TEST(GpuBatchNormTest, AStepDoesNotWaitForTheGpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
  run_ranks(1, [](int) {
    dist::init_process_group();
    expect_layers_do_not_wait();
  });
}

TEST(GpuBatchNormTest, AStepOfTwoRanksExchangesTwiceAndDoesNotWaitForTheGpu) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks(2, [](int) {
    dist::init_process_group();
    expect_layers_do_not_wait();
  });
}

/// What a layer asks of the fake CUDA devices, which count it.
class LayerCounts {
 public:
  /// @param parameters type of the layer's parameters
  LayerCounts(at::ScalarType type, at::ScalarType parameters, at::MemoryFormat format, bool fused) {
    SyncBatchNorm layer(SyncBatchNormOptions(16).fuse_relu(fused));
    layer->to(dist::device(), parameters);
    const auto options = at::TensorOptions().device(dist::device()).dtype(type);
    const auto values = [&] { return at::randn({4, 16, 5, 5}, options).contiguous(format); };
    const at::Tensor input = values().requires_grad_();
    const at::Tensor residual = values().requires_grad_();
    const at::Tensor gradient = values();
    const auto step = [&] {
      const fake_cuda::Counts first = fake_cuda::counts();
      const at::Tensor output = layer(input, fused ? residual : at::Tensor());
      const fake_cuda::Counts second = fake_cuda::counts();
      output.backward(gradient);
      forward = second - first;
      backward = fake_cuda::counts() - second;
    };
    step();  // creates the group, and gradients that the next lines drop
    for (const at::Tensor& leaf : {input, residual, layer->weight, layer->bias}) {
      leaf.mutable_grad() = at::Tensor();
    }
    step();
  }

  fake_cuda::Counts forward, backward;
};

void expect_four_launches() {
  using fake_cuda::Count;
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      for (const bool fused : {false, true}) {
        for (const at::ScalarType parameters : {at::kFloat, type}) {
          SCOPED_TRACE(fmt::format("{}, parameters {}, {}", c10::toString(type),
                                   c10::toString(parameters), fused ? "fused" : "not fused"));
          const LayerCounts counts(type, parameters, format, fused);
          for (const fake_cuda::Counts& part : {counts.forward, counts.backward}) {
            // The first kernel also exchanges the rows, without NCCL.
            EXPECT_EQ(part[Count::kKernels], 2u);
            EXPECT_EQ(part[Count::kCollectives], 0u);
            EXPECT_EQ(part[Count::kOperators], 0u);
            EXPECT_EQ(part[Count::kMemsets], 0u);
            EXPECT_EQ(part[Count::kHostToDevice] + part[Count::kDeviceToHost] +
                          part[Count::kDeviceToDevice],
                      0u);
            EXPECT_EQ(part.host_waits(), 0u);
          }
        }
      }
    }
  }
}

TEST(GpuLaunchesTest, ALayerLaunchesTwoKernelsForwardAndTwoBackward) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    expect_four_launches();
  });
}

TEST(GpuLaunchesTest, ALayerOfTwoRanksLaunchesNoKernelMoreForItsExchanges) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    expect_four_launches();
  });
}

/// The output and all gradients of three steps, in a group with the given options.
Tensors results_of_steps(const dist::NcclOptions& nccl, bool has_peers) {
  const auto group = dist::new_group({0, 1}, std::nullopt, nccl);
  EXPECT_EQ(dist::detail::backend_of(group)->gathers_by_peers(9), has_peers);
  at::manual_seed(5 + dist::rank());
  SyncBatchNorm layer(SyncBatchNormOptions(4).process_group(group));
  layer->to(dist::device());
  Tensors results;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor input =
        (at::randn({3 + dist::rank(), 4, 5, 5}) * 7).to(dist::device()).requires_grad_();
    const at::Tensor output = layer(input);
    (output * output.detach()).sum().backward();
    results.insert(results.end(), {output.detach().cpu(), input.grad().cpu()});
  }
  for (const at::Tensor& buffer : layer->buffers()) results.push_back(buffer.cpu());
  results.push_back(layer->weight.grad().cpu());
  return results;
}

TEST(GpuBatchNormTest, ExchangesThroughPeerMemoryGiveTheBitsOfNccl) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks(2, [](int) {
    dist::init_process_group({.backend = "nccl"});
    const Tensors by_peers = results_of_steps({}, true);
    const Tensors by_nccl = results_of_steps({.peer_memory = false}, false);
    ASSERT_EQ(by_peers.size(), by_nccl.size());
    for (size_t i = 0; i < by_peers.size(); ++i) EXPECT_TRUE(by_peers[i].equal(by_nccl[i])) << i;
    dist::destroy_process_group();
  });
}

TEST(GpuLaunchesTest, GpusThatDoNotReachEachOtherExchangeByNccl) {
  const syncbn::test::Environment none("FAKE_CUDA_PEERS", "0");
  const auto results = syncbn::test::run_ranks_and_collect({}, [](int) {
    dist::init_process_group({.backend = "nccl"});
    const fake_cuda::Counts before = fake_cuda::counts();
    results_of_steps({}, false);
    EXPECT_EQ((fake_cuda::counts() - before)[fake_cuda::Count::kCollectives], 6u);
    dist::destroy_process_group();
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.output;
  const std::string line = "statistics of batch norm go by NCCL, since GPUs do not share memory: ";
  const size_t first = results.at(0).output.find(line);
  ASSERT_NE(first, std::string::npos) << results[0].output;
  EXPECT_EQ(results[0].output.find(line, first + 1), std::string::npos);  // once, in 6 exchanges
  EXPECT_EQ(results[1].output.find(line), std::string::npos);
}

TEST(GpuLaunchesTest, OptionsReachNccl) {
  run_ranks(2, [](int) {
    dist::init_process_group(
        {.backend = "nccl", .nccl = {.min_ctas = 3, .max_ctas = 5, .blocking = false}});
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
  run_ranks(2, [](int) {
    dist::init_process_group({.backend = "nccl"});
    Tensors plain;
    EXPECT_EQ(registrations_of_training(false, plain), 0u);
    Tensors registered;
    EXPECT_GT(registrations_of_training(true, registered), 0u);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(registered.at(i).equal(plain[i])) << i;
    dist::destroy_process_group();
  });
}

// NCCL performs the exchanges; collectives between CPUs compare the headers.
TEST(GpuBatchNormTest, HeadersOfExchangesAreComparedOnceForSixteen) {
  SYNCBN_SKIP_UNLESS(gpus() > 1, "two-gpus");
  run_ranks(2, [](int) {
    dist::init_process_group({.backend = "nccl", .nccl = {.peer_memory = false}});
    SyncBatchNorm layer(SyncBatchNormOptions(4).process_group(dist::default_group()));
    layer->to(dist::device());
    const at::Tensor input =
        at::randn({2, 4}, at::TensorOptions().device(dist::device())).requires_grad_();
    const auto step = [&] { layer(input).sum().backward(); };
    const dist::detail::Backend& backend = *dist::detail::backend_of(dist::default_group());
    const uint64_t before = backend.sequence();
    constexpr uint64_t kExchanges = 64;  // two in each step
    for (uint64_t i = 0; i < kExchanges / 2; ++i) step();
    EXPECT_EQ(backend.sequence() - before, kExchanges + kExchanges / 16);
    dist::destroy_process_group();
  });
}

}  // namespace
