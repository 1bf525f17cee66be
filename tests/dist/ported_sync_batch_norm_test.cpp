// PyTorch's tests of its SyncBatchNorm (torch/testing/_internal/distributed/distributed_test.py;
// the last one is from test_nn.py), with their names less "DistributedDataParallel_".

#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <cmath>
#include <memory>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mse_loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "dist/device.h"
#include "dist/tensors.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::device;
using syncbn::test::exchanges;
using syncbn::test::on_device;
using syncbn::test::randn;
using syncbn::test::run_on_device;
using syncbn::test::zeros;
using PortedSyncBatchNormTest = syncbn::test::DeviceTest;

// The tolerances of assertEqual for float32.
constexpr double kRtol = 1.3e-6;
constexpr double kAtol = 1e-5;

struct BatchNormNetImpl : nn::Module {
  explicit BatchNormNetImpl(bool affine = true) {
    fc1 = register_module("fc1", nn::Linear(nn::LinearOptions(2, 40).bias(false)));
    bn = register_module("bn", nn::BatchNorm1d(nn::BatchNorm1dOptions(4).affine(affine)));
    fc2 = register_module("fc2", nn::Linear(nn::LinearOptions(40, 4).bias(false)));
    to(device());
  }
  at::Tensor forward(const at::Tensor& x) {
    return fc2(bn(fc1(x).reshape({-1, 4, 10})).reshape({-1, 40})).softmax(1);
  }
  nn::Linear fc1{nullptr}, fc2{nullptr};
  nn::BatchNorm1d bn{nullptr};
};
TORCH_MODULE(BatchNormNet);

/// This rank's samples among all samples.
struct Share {
  int64_t local, offset, global;

  static Share even(int64_t local) {
    return {local, dist::rank() * local, dist::world_size() * local};
  }
};

/// Trains `net` on shares and `reference` on the whole batch; compares them after each step.
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
  const at::Tensor input = randn(sample).contiguous(format);
  const at::Tensor target = randn(target_sizes).contiguous(format);
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

TEST_F(PortedSyncBatchNormTest, SyncBatchNorm) {
  run_on_device(2, [](int) { check_batch_norm_net(Share::even(2)); });
}

TEST_F(PortedSyncBatchNormTest, SyncBatchNorm_No_Affine) {
  run_on_device(2, [](int) { check_batch_norm_net(Share::even(2), /*affine=*/false); });
}

TEST_F(PortedSyncBatchNormTest, SyncBatchNorm_2D_Input) {
  run_on_device(2, [](int) {
    auto layer = on_device(nn::BatchNorm1d(2));
    auto reference = on_device(nn::BatchNorm1d(2));
    dist::convert_sync_batchnorm(*layer);
    check_two_model_parameters(layer.ptr(), *reference, {2}, 2, Share::even(2), 5);
  });
}

// Trains the layer itself: nn::BatchNorm1d may refuse one value per channel even if converted.
TEST_F(PortedSyncBatchNormTest, SyncBatchNorm_Single_Input_Per_Process) {
  run_on_device(3, [](int) {
    auto layer = on_device(SyncBatchNorm(2));
    auto reference = on_device(nn::BatchNorm1d(2));
    check_two_model_parameters(layer.ptr(), *reference, {2}, 2, Share::even(1), 5);
  });
}

TEST_F(PortedSyncBatchNormTest, SyncBatchNorm_Diff_Input_Sizes_Running_Value) {
  run_on_device(2, [](int rank) {
    auto layer = on_device(SyncBatchNorm(SyncBatchNormOptions(2).momentum(0.99)));
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
    const at::Tensor input = inputs[static_cast<size_t>(rank)].to(device());
    for (int step = 0; step < 100; ++step) {
      ddp(input).mean().backward();
    }
    EXPECT_TRUE(close(layer->running_mean, all.mean(1), kRtol, kAtol));
    EXPECT_TRUE(close(layer->running_var, all.var(1), kRtol, kAtol));
  });
}

TEST_F(PortedSyncBatchNormTest, SyncBatchNorm_Diff_Input_Sizes_gradient) {
  run_on_device(3, [](int rank) {
    const int64_t ranks = dist::world_size();
    check_batch_norm_net({rank + 2, (rank + 3) * rank / 2, (ranks + 3) * ranks / 2});
  });
}

// PyTorch's test checks only dtypes; this one compares values with float64.
TEST_F(PortedSyncBatchNormTest, SyncBatchNorm_half) {
  run_on_device(2, [](int rank) {
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
    const at::Tensor input = randn({6, 2}).to(at::kHalf);
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

TEST_F(PortedSyncBatchNormTest, SyncBatchNorm_Channels_Last) {
  run_on_device(2, [](int) {
    auto layer = on_device(SyncBatchNorm(SyncBatchNormOptions(2).momentum(0.99)));
    auto reference = on_device(nn::BatchNorm2d(nn::BatchNormOptions(2).momentum(0.99)));
    check_two_model_parameters(layer.ptr(), *reference, {2, 4, 4}, 2, Share::even(2), 5,
                               at::MemoryFormat::ChannelsLast);
    auto layer_3d = on_device(SyncBatchNorm(SyncBatchNormOptions(2).momentum(0.99)));
    auto reference_3d = on_device(nn::BatchNorm3d(nn::BatchNormOptions(2).momentum(0.99)));
    check_two_model_parameters(layer_3d.ptr(), *reference_3d, {2, 4, 4, 4}, 2, Share::even(2), 5,
                               at::MemoryFormat::ChannelsLast3d);
  });
}

// PyTorch's test checks an attribute of a nested layer; this one runs the layer.
TEST_F(PortedSyncBatchNormTest, SyncBatchNorm_process_group) {
  run_on_device(3, [](int rank) {
    const auto group = dist::new_group({0, 1});
    BatchNormNet net;
    if (rank == 2) {
      dist::barrier();
      return;
    }
    dist::convert_sync_batchnorm(*net, group);
    const uint64_t before = exchanges(group);
    net(randn({4, 2}));
    EXPECT_EQ(exchanges(group), before + 1);
    dist::barrier();
  });
}

/// A layer whose weights are not just ones and zeros, and libtorch's with the same weights.
struct LayerAndReference {
  LayerAndReference() {
    at::manual_seed(1);
    for (const char* name : {"weight", "bias"}) {
      const at::Tensor values = randn({2});
      layer->named_parameters()[name].set_data(values.clone());
      reference->named_parameters()[name].set_data(values.clone());
    }
  }
  SyncBatchNorm layer = on_device(SyncBatchNorm(2));
  nn::BatchNorm2d reference = on_device(nn::BatchNorm2d(2));
};

/// Trains on this rank's samples of a batch of four that two ranks divide, and libtorch's layer on
/// the whole batch, and compares them. DDP's gradients are means over ranks.
void check_share_of_batch(LayerAndReference& both,
                          dist::DistributedDataParallel<dist::SyncBatchNormImpl>& ddp,
                          int64_t offset, int64_t local) {
  const auto own = [&](const at::Tensor& all) { return all.narrow(0, offset, local); };
  const at::Tensor whole = (randn({4, 2, 8, 8}) * 3 + 1).requires_grad_();
  const at::Tensor input = own(whole.detach()).clone().requires_grad_();
  const at::Tensor grad_output = randn({4, 2, 8, 8});
  const at::Tensor output = ddp(input);
  const at::Tensor expected = both.reference(whole);
  output.backward(own(grad_output));
  expected.backward(grad_output);
  // close() is also false for NaN.
  EXPECT_TRUE(close(output, own(expected)));
  EXPECT_TRUE(close(input.grad(), own(whole.grad())));
  for (const char* name : {"weight", "bias"}) {
    EXPECT_TRUE(close(both.layer->named_parameters()[name].grad() * 2,
                      both.reference->named_parameters()[name].grad(), 1e-5, 1e-5))
        << name;
  }
  for (const char* name : {"running_mean", "running_var", "num_batches_tracked"}) {
    EXPECT_TRUE(close(both.layer->named_buffers()[name], both.reference->named_buffers()[name]))
        << name;
  }
}

// Like test_sync_batch_norm_*empty_input in test_c10d_nccl.py, which checks sizes: one empty rank,
// and only empty ranks.
TEST_F(PortedSyncBatchNormTest, sync_batch_norm_empty_input) {
  run_on_device(2, [](int rank) {
    LayerAndReference both;
    dist::DistributedDataParallel<dist::SyncBatchNormImpl> ddp(both.layer);
    check_share_of_batch(both, ddp, 0, rank == 0 ? 0 : 4);
  });
}

TEST_F(PortedSyncBatchNormTest, sync_batch_norm_only_empty_input) {
  run_on_device(2, [](int rank) {
    LayerAndReference both;
    dist::DistributedDataParallel<dist::SyncBatchNormImpl> ddp(both.layer);
    std::vector<at::Tensor> before;
    for (const at::Tensor& buffer : both.layer->buffers()) before.push_back(buffer.clone());
    for (const bool training : {true, false}) {
      ddp.train(training);
      const at::Tensor input = zeros({0, 2, 11, 13}).requires_grad_();
      const at::Tensor output = ddp(input);
      EXPECT_EQ(output.sizes(), input.sizes());
      output.sum().backward();
      EXPECT_EQ(input.grad().sizes(), input.sizes());
      EXPECT_TRUE(both.layer->weight.grad().equal(zeros({2})));
      EXPECT_TRUE(both.layer->bias.grad().equal(zeros({2})));
      const auto after = both.layer->buffers();
      for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
      ddp.zero_grad();
    }
    // Training continues as before.
    ddp.train();
    check_share_of_batch(both, ddp, 2 * rank, 2);
  });
}

TEST_F(PortedSyncBatchNormTest, ddp_sync_bn_training_vs_eval) {
  run_on_device(2, [](int rank) {
    auto layer = std::make_shared<dist::SyncBatchNormImpl>(
        SyncBatchNormOptions(2).momentum(0.99).track_running_stats(false));
    layer->to(device());
    dist::DistributedDataParallel<dist::SyncBatchNormImpl> net(layer);
    exchanges();  // creates the group
    const auto run_six_times = [&](uint64_t expected) {
      for (int i = 0; i < 6; ++i) {
        const uint64_t before = exchanges();
        net(randn({10, 2, 4, 4}).requires_grad_()).sum().backward();
        EXPECT_EQ(exchanges() - before, expected);
      }
    };
    run_six_times(2);
    if (rank > 0) return;
    // Evaluation exchanges nothing, so one rank can run alone.
    layer->eval();
    const at::Tensor input = randn({10, 2, 4, 4}).requires_grad_();
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

TEST_F(PortedSyncBatchNormTest, sync_batch_norm_training_vs_eval) {
  run_on_device(2, [](int rank) {
    at::manual_seed(static_cast<uint64_t>(rank));
    // With momentum 1 the running statistics are the batch's, except for the bias of the variance.
    auto layer = on_device(SyncBatchNorm(SyncBatchNormOptions(3).momentum(1.0)));
    const at::Tensor input = randn({64, 3, 8, 8});
    const at::Tensor training = layer(input);
    layer->eval();
    EXPECT_TRUE(close(layer(input), training, 1e-4, 1e-3));
    EXPECT_FALSE(layer(input).equal(training));
  });
}

TEST_F(PortedSyncBatchNormTest, sync_batchnorm_accuracy) {
  run_on_device(2, [](int rank) {
    at::manual_seed(0);
    const at::Tensor whole = randn({2, 96, 112, 112});
    const at::Tensor exact = whole.to(at::kDouble);
    // On GPUs ATen's kernels sum in float32, and PyTorch's test has its usual tolerance.
    const double atol = device().is_cuda() ? kAtol : 1e-8;
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      auto layer = on_device(SyncBatchNorm(SyncBatchNormOptions(96).momentum(1.0)));
      layer(whole.narrow(0, rank, 1).contiguous(format));
      EXPECT_TRUE(close(layer->running_mean, exact.mean({0, 2, 3}), kRtol, atol));
      EXPECT_TRUE(close(layer->running_var, exact.var({0, 2, 3}), kRtol, atol));
    }
  });
}

}  // namespace
