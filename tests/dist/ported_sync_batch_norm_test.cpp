// What PyTorch tests of its SyncBatchNorm (torch/testing/_internal/distributed/distributed_test.py,
// and test_nn.py for the last), on CPUs and under the same names, less "DistributedDataParallel_".

#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "dist/tensors.h"
#include "groups/world.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::run_ranks;

// assertEqual's for float32.
constexpr double kRtol = 1.3e-6;
constexpr double kAtol = 1e-5;

struct BatchNormNetImpl : nn::Module {
  explicit BatchNormNetImpl(bool affine = true) {
    fc1 = register_module("fc1", nn::Linear(nn::LinearOptions(2, 40).bias(false)));
    bn = register_module("bn", nn::BatchNorm1d(nn::BatchNorm1dOptions(4).affine(affine)));
    fc2 = register_module("fc2", nn::Linear(nn::LinearOptions(40, 4).bias(false)));
  }
  at::Tensor forward(const at::Tensor& x) {
    return fc2(bn(fc1(x).reshape({-1, 4, 10})).reshape({-1, 40})).softmax(1);
  }
  nn::Linear fc1{nullptr}, fc2{nullptr};
  nn::BatchNorm1d bn{nullptr};
};
TORCH_MODULE(BatchNormNet);

/// The samples of this rank among those of all.
struct Share {
  int64_t local, offset, global;

  static Share even(int64_t local) {
    return {local, dist::rank() * local, dist::world_size() * local};
  }
};

/// Trains `net` on shares and `reference` on the whole batch, and compares after each step.
template <class Net, class Reference>
void check_two_model_parameters(const std::shared_ptr<Net>& net, Reference& reference,
                                std::vector<int64_t> sample, int64_t outputs, const Share& share,
                                int iterations,
                                at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  dist::DistributedDataParallel<Net> ddp(net);
  at::manual_seed(1337);
  sample.insert(sample.begin(), share.global);
  std::vector<int64_t> target_sizes = sample;
  target_sizes[1] = outputs;
  const at::Tensor input = at::randn(sample).contiguous(format);
  const at::Tensor target = at::randn(target_sizes).contiguous(format);
  const auto own = [&](const at::Tensor& all) {
    return all.narrow(0, share.offset, share.local).contiguous(format);
  };
  const auto update = [](const nn::Module& module) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : module.parameters()) {
      parameter.add_(parameter.grad());
      parameter.mutable_grad() = at::Tensor();
    }
  };
  for (int i = 0; i < iterations; ++i) {
    at::mse_loss(reference.forward(input), target).backward();
    const double scale = static_cast<double>(dist::world_size()) *
                         static_cast<double>(share.local) / static_cast<double>(share.global);
    const at::Tensor output = ddp(own(input));
    EXPECT_TRUE(output.is_contiguous(format));
    (at::mse_loss(output, own(target)) * scale).backward();
    update(*net);
    update(reference);
    const auto actual = net->parameters();
    const auto expected = reference.parameters();
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t p = 0; p < actual.size(); ++p) {
      ASSERT_TRUE(close(actual[p], expected[p], kRtol, kAtol)) << "parameter " << p << ", " << i;
    }
  }
}

void check_batch_norm_net(const Share& share, bool affine = true) {
  at::manual_seed(0);
  BatchNormNet net(affine);
  at::manual_seed(0);
  BatchNormNet reference(affine);
  EXPECT_EQ(dist::convert_sync_batchnorm(*net).converted.size(), 1u);
  check_two_model_parameters(net.ptr(), *reference, {2}, 4, share, affine ? 5 : 2);
}

TEST(PortedSyncBatchNormTest, SyncBatchNorm) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    check_batch_norm_net(Share::even(2));
  });
}

TEST(PortedSyncBatchNormTest, SyncBatchNorm_No_Affine) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    check_batch_norm_net(Share::even(2), /*affine=*/false);
  });
}

TEST(PortedSyncBatchNormTest, SyncBatchNorm_2D_Input) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    nn::BatchNorm1d layer(2);
    nn::BatchNorm1d reference(2);
    dist::convert_sync_batchnorm(*layer);
    check_two_model_parameters(layer.ptr(), *reference, {2}, 2, Share::even(2), 5);
  });
}

// nn::BatchNorm1d refuses one value per channel before a conversion can help: the layer itself.
TEST(PortedSyncBatchNormTest, SyncBatchNorm_Single_Input_Per_Process) {
  run_ranks(3, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(2);
    nn::BatchNorm1d reference(2);
    check_two_model_parameters(layer.ptr(), *reference, {2}, 2, Share::even(1), 5);
  });
}

TEST(PortedSyncBatchNormTest, SyncBatchNorm_Diff_Input_Sizes_Running_Value) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(2).momentum(0.99));
    dist::DistributedDataParallel<dist::SyncBatchNormImpl> ddp(layer);
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> flat;
    for (int i = 0; i < 2; ++i) {
      const auto length = static_cast<int64_t>(std::pow(10, i + 1));
      inputs.push_back(at::cat({at::full({2, 1, length}, std::pow(0.1, i - 1)),
                                at::full({2, 1, length}, std::pow(0.3, i - 1))},
                               1));
      flat.push_back(inputs.back().permute({1, 0, 2}).reshape({2, -1}));
    }
    const at::Tensor all = at::cat(flat, 1);
    for (int step = 0; step < 100; ++step) {
      ddp(inputs[static_cast<size_t>(rank)]).mean().backward();
    }
    EXPECT_TRUE(close(layer->running_mean, all.mean(1), kRtol, kAtol));
    EXPECT_TRUE(close(layer->running_var, all.var(1), kRtol, kAtol));
  });
}

TEST(PortedSyncBatchNormTest, SyncBatchNorm_Diff_Input_Sizes_gradient) {
  run_ranks(3, [](int rank) {
    dist::init_process_group();
    const int64_t ranks = dist::world_size();
    check_batch_norm_net({rank + 2, (rank + 3) * rank / 2, (ranks + 3) * ranks / 2});
  });
}

// PyTorch's only looks at dtypes; here values are compared with float64.
TEST(PortedSyncBatchNormTest, SyncBatchNorm_half) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    const auto make = [](at::ScalarType type) {
      at::manual_seed(0);
      BatchNormNet net;
      net->to(at::kHalf);
      net->to(type);
      dist::convert_sync_batchnorm(*net);
      return net;
    };
    BatchNormNet net = make(at::kHalf);
    BatchNormNet reference = make(at::kDouble);
    dist::DistributedDataParallel<BatchNormNetImpl> ddp(net);
    at::manual_seed(static_cast<uint64_t>(rank));
    const at::Tensor input = at::randn({6, 2}).to(at::kHalf);
    const at::Tensor output = ddp(input);
    const at::Tensor expected = reference(input.to(at::kDouble));
    EXPECT_EQ(output.scalar_type(), at::kHalf);
    EXPECT_TRUE(close(output, expected, 1e-2, 5e-3));
    output.pow(2).sum().backward();
    expected.pow(2).sum().backward();
    const auto halves = net->parameters();
    const auto exact = reference->parameters();
    for (size_t i = 0; i < halves.size(); ++i) {
      EXPECT_EQ(halves[i].grad().scalar_type(), at::kHalf);
      at::Tensor mean = exact[i].grad().clone();
      dist::all_reduce(mean);
      mean.div_(2);
      const double scale = mean.abs().max().item<double>();
      EXPECT_TRUE(close(halves[i].grad(), mean, 2e-2, 2e-2 * scale)) << "parameter " << i;
    }
  });
}

TEST(PortedSyncBatchNormTest, SyncBatchNorm_Channels_Last) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(2).momentum(0.99));
    nn::BatchNorm2d reference(nn::BatchNormOptions(2).momentum(0.99));
    check_two_model_parameters(layer.ptr(), *reference, {2, 4, 4}, 2, Share::even(2), 5,
                               at::MemoryFormat::ChannelsLast);
    SyncBatchNorm layer_3d(SyncBatchNormOptions(2).momentum(0.99));
    nn::BatchNorm3d reference_3d(nn::BatchNormOptions(2).momentum(0.99));
    check_two_model_parameters(layer_3d.ptr(), *reference_3d, {2, 4, 4, 4}, 2, Share::even(2), 5,
                               at::MemoryFormat::ChannelsLast3d);
  });
}

// PyTorch's looks at an attribute of a nested layer; here the layer runs.
TEST(PortedSyncBatchNormTest, SyncBatchNorm_process_group) {
  run_ranks(3, [](int rank) {
    dist::init_process_group();
    const auto group = dist::new_group({0, 1});
    BatchNormNet net;
    if (rank == 2) {
      dist::barrier();
      return;
    }
    dist::convert_sync_batchnorm(*net, group);
    auto* backend = dist::detail::backend_of(group);
    const uint64_t before = backend->sequence();
    net(at::randn({4, 2}));
    EXPECT_EQ(backend->sequence(), before + 1);
    dist::barrier();
  });
}

// As test_sync_batch_norm_*empty_input of test_c10d_nccl.py: an empty rank, and only such.
TEST(PortedSyncBatchNormTest, sync_batch_norm_empty_input) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    SyncBatchNorm layer(2);
    dist::DistributedDataParallel<dist::SyncBatchNormImpl> ddp(layer);
    const at::Tensor input = at::randn({rank == 0 ? 0 : 4, 2, 8, 8}).requires_grad_();
    ddp(input).sum().backward();
    EXPECT_EQ(input.grad().sizes(), input.sizes());
  });
}

TEST(PortedSyncBatchNormTest, sync_batch_norm_only_empty_input) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(2);
    dist::DistributedDataParallel<dist::SyncBatchNormImpl> ddp(layer);
    for (const bool training : {true, false}) {
      ddp.train(training);
      const at::Tensor input = at::empty({0, 2, 11, 13}).requires_grad_();
      ddp(input).sum().backward();
      EXPECT_EQ(input.grad().sizes(), input.sizes());
      EXPECT_TRUE(layer->weight.grad().equal(at::zeros({2})));
      ddp.zero_grad();
    }
  });
}

TEST(PortedSyncBatchNormTest, ddp_sync_bn_training_vs_eval) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    auto layer = std::make_shared<dist::SyncBatchNormImpl>(
        SyncBatchNormOptions(2).momentum(0.99).track_running_stats(false));
    dist::DistributedDataParallel<dist::SyncBatchNormImpl> net(layer);
    const auto exchanges = [] {
      return dist::detail::backend_of(dist::detail::statistics_group({}))->sequence();
    };
    exchanges();  // makes the group
    const auto run_six_times = [&](uint64_t expected) {
      for (int i = 0; i < 6; ++i) {
        const uint64_t before = exchanges();
        net(at::randn({10, 2, 4, 4}).requires_grad_()).sum().backward();
        EXPECT_EQ(exchanges() - before, expected);
      }
    };
    run_six_times(2);
    if (rank > 0) return;
    // In evaluation nothing is exchanged, and one rank can run alone.
    layer->eval();
    const at::Tensor input = at::randn({10, 2, 4, 4}).requires_grad_();
    for (int i = 0; i < 6; ++i) {
      const uint64_t before = exchanges();
      const at::Tensor output = layer->forward(input);
      output.sum().backward();
      EXPECT_EQ(exchanges(), before);
      EXPECT_TRUE(close(output, at::batch_norm(input, {}, {}, {}, {}, true, 0.1, 1e-5, false),
                        kRtol, kAtol));
    }
  });
}

TEST(PortedSyncBatchNormTest, sync_batch_norm_training_vs_eval) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(static_cast<uint64_t>(rank));
    // With momentum 1 the running statistics are the batch's: only the bias of the variance
    // differs.
    SyncBatchNorm layer(SyncBatchNormOptions(3).momentum(1.0));
    const at::Tensor input = at::randn({64, 3, 8, 8});
    const at::Tensor training = layer(input);
    layer->eval();
    EXPECT_TRUE(close(layer(input), training, 1e-4, 1e-3));
    EXPECT_FALSE(layer(input).equal(training));
  });
}

TEST(PortedSyncBatchNormTest, sync_batchnorm_accuracy) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(0);
    const at::Tensor whole = at::randn({2, 96, 112, 112});
    const at::Tensor exact = whole.to(at::kDouble);
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      SyncBatchNorm layer(SyncBatchNormOptions(96).momentum(1.0));
      layer(whole.narrow(0, rank, 1).contiguous(format));
      EXPECT_TRUE(close(layer->running_mean, exact.mean({0, 2, 3}), kRtol, 1e-8));
      EXPECT_TRUE(close(layer->running_var, exact.var({0, 2, 3}), kRtol, 1e-8));
    }
  });
}

}  // namespace
