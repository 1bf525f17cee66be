// Recomputing parts of forward in backward, with SyncBatchNorm inside.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/checkpoint.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "dist/device.h"
#include "dist/tensors.h"
#include "dist/training.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::checkpoint;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::device;
using syncbn::test::exchanges;
using syncbn::test::message_of;
using syncbn::test::randn;
using syncbn::test::run_on_device;
using syncbn::test::run_ranks;
using syncbn::test::sgd_step;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using CheckpointTest = syncbn::test::DeviceTest;

constexpr int kRecomputedLayers = 5;
constexpr int kRecomputedSteps = 5;

/// Layers of either kind, with cumulative averages, where a second update would change most.
struct RecomputingNetImpl : nn::Module {
  explicit RecomputingNetImpl(bool recompute, bool converted) : recompute(recompute) {
    at::manual_seed(1);
    linear = register_module("linear", nn::Linear(3, 3));
    layers = register_module("layers", nn::Sequential());
    for (int i = 0; i < kRecomputedLayers; ++i) {
      layers->push_back(nn::Linear(3, 3));
      if (converted) {
        layers->push_back(nn::BatchNorm1d(nn::BatchNormOptions(3).momentum(std::nullopt)));
      } else {
        layers->push_back(SyncBatchNorm(SyncBatchNormOptions(3).momentum(std::nullopt)));
      }
      layers->push_back(nn::Sigmoid());
    }
    to(device());
    if (converted) dist::convert_sync_batchnorm(*this);
  }

  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = linear(input);
    const auto stretch = [this](const at::Tensor& y) { return layers->forward(y); };
    return recompute ? checkpoint(stretch, x) : stretch(x);
  }

  bool recompute;
  nn::Linear linear{nullptr};
  nn::Sequential layers{nullptr};
};
TORCH_MODULE(RecomputingNet);

void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  // In a world of one, a converted layer is libtorch's, except for its statistics in a checkpoint.
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(close(actual[i], expected[i], 1e-4, 1e-4)) << i;
  }
}

Tensors gradients(const nn::Module& module) {
  Tensors all;
  for (const at::Tensor& parameter : module.parameters()) all.push_back(parameter.grad());
  return all;
}

/// Trains a network with and without checkpoint: the results are equal, and so are the exchanges.
void expect_as_without(bool converted) {
  RecomputingNet plain(false, converted);
  RecomputingNet recomputing(true, converted);
  const uint64_t expected = dist::world_size() > 1 ? kRecomputedLayers : 0;
  at::manual_seed(7 + static_cast<uint64_t>(dist::rank()));
  for (int step = 0; step < kRecomputedSteps; ++step) {
    const at::Tensor batch = randn({8, 3});
    plain(batch).pow(3).sum().backward();
    uint64_t before = exchanges();
    const at::Tensor output = recomputing(batch);
    EXPECT_EQ(exchanges() - before, expected) << "forward of step " << step;
    before = exchanges();
    output.pow(3).sum().backward();
    EXPECT_EQ(exchanges() - before, expected) << "backward of step " << step;
    expect_equal(gradients(*recomputing), gradients(*plain));
    expect_equal(recomputing->buffers(), plain->buffers());
    sgd_step(*recomputing);
    sgd_step(*plain);
  }
}

TEST_F(CheckpointTest, GivesTheSameGradientsAndRunningStatistics) {
  for (const int ranks : {1, 2}) {
    for (const bool converted : {false, true}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks" << (converted ? ", converted" : ""));
      run_on_device(ranks, [converted](int) { expect_as_without(converted); });
    }
  }
}

TEST_F(CheckpointTest, WorksInsideDdp) {
  run_on_device(2, [](int rank) {
    for (const bool static_graph : {false, true}) {
      RecomputingNet plain(false, false);
      RecomputingNet recomputing(true, false);
      dist::DistributedDataParallel<RecomputingNetImpl> expected(plain);
      dist::DistributedDataParallel<RecomputingNetImpl> actual(recomputing,
                                                               {.static_graph = static_graph});
      at::manual_seed(static_cast<uint64_t>(rank));
      for (int step = 0; step < 3; ++step) {
        const at::Tensor batch = randn({4, 3});
        expected(batch).pow(3).sum().backward();
        actual(batch).pow(3).sum().backward();
        expect_equal(gradients(*recomputing), gradients(*plain));
      }
    }
  });
}

TEST_F(CheckpointTest, CallsNest) {
  run_on_device(2, [](int) {
    RecomputingNet net(/*recompute=*/true, /*converted=*/false);
    RecomputingNet plain(/*recompute=*/false, /*converted=*/false);
    const at::Tensor batch = randn({4, 3});
    const at::Tensor inner = batch.clone().requires_grad_();
    exchanges();
    const uint64_t before = exchanges();
    checkpoint([&](const at::Tensor& x) { return net(x); }, inner).pow(3).sum().backward();
    EXPECT_EQ(exchanges() - before, 2u * kRecomputedLayers);
    plain(batch).pow(3).sum().backward();
    expect_equal(gradients(*net), gradients(*plain));
    expect_equal(net->buffers(), plain->buffers());
  });
}

TEST_F(CheckpointTest, DropsTheSameValuesBothTimes) {
  run_ranks(1, [](int) {
    // With the device's own generator.
    const auto draw = [](int64_t n) { return at::randn({n}, at::TensorOptions(device())); };
    at::manual_seed(3);
    const at::Tensor input = draw(100).requires_grad_();
    const auto drop = [](const at::Tensor& x) { return at::dropout(x, 0.5, true); };
    const at::Tensor output = checkpoint(drop, input);
    const at::Tensor next = draw(3);
    output.sum().backward();
    EXPECT_TRUE(close(input.grad() * input, output));
    // Draws outside of the checkpoint continue as if there were none.
    const at::Tensor after = draw(3);
    at::manual_seed(3);
    draw(100);
    at::dropout(input, 0.5, true);
    EXPECT_TRUE(draw(3).equal(next));
    EXPECT_TRUE(draw(3).equal(after));
  });
}

TEST_F(CheckpointTest, RecomputesUnderTheSameAutocast) {
  run_ranks(1, [](int) {
    std::vector<at::ScalarType> seen;
    const at::Tensor weight = randn({3, 3});
    const auto multiply = [&](const at::Tensor& x) {
      at::Tensor product = x.matmul(weight);
      seen.push_back(product.scalar_type());
      return product;
    };
    const at::Tensor input = randn({2, 3}).requires_grad_();
    const at::DeviceType type = device().type();
    at::autocast::set_autocast_enabled(type, true);
    const at::Tensor output = checkpoint(multiply, input);
    at::autocast::set_autocast_enabled(type, false);
    output.sum().backward();
    const at::ScalarType reduced = at::autocast::get_autocast_dtype(type);
    EXPECT_THAT(seen, ::testing::ElementsAre(reduced, reduced));
    EXPECT_FALSE(at::autocast::is_autocast_enabled(type));
  });
}

// As in a training step: autocast drops its casts when it ends, and backward comes afterwards.
TEST_F(CheckpointTest, NoCastOfAParameterOutlivesItsStep) {
  run_ranks(1, [](int) {
    const at::DeviceType type = device().type();
    const auto train = [&](bool recompute, bool shared) {
      at::manual_seed(1);
      const at::Tensor weight = randn({3, 3}).requires_grad_();
      const at::Tensor input = randn({2, 3}).requires_grad_();
      const auto multiply = [&](const at::Tensor& x) { return x.matmul(weight); };
      for (int step = 0; step < 3; ++step) {
        at::autocast::set_autocast_enabled(type, true);
        at::autocast::increment_nesting();
        at::Tensor output = recompute ? checkpoint(multiply, input) : multiply(input);
        if (shared) output = multiply(output);
        if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(type, false);
        output.sum().backward();
        const at::NoGradGuard no_grad;
        weight.sub_(weight.grad(), 0.1);
        weight.mutable_grad().reset();
      }
      return weight.detach();
    };
    EXPECT_TRUE(at::equal(train(true, false), train(false, false)));
    // With two casts the gradients are added in float32, with one shared cast in bfloat16.
    EXPECT_TRUE(at::allclose(train(true, true), train(false, true), 0.01, 0.01))
        << "a cast outside of the function has a graph";
  });
}

TEST_F(CheckpointTest, TakesSeveralInputsAndOutputs) {
  run_ranks(1, [](int) {
    const at::Tensor a = randn({3}).requires_grad_();
    const at::Tensor b = randn({3}).requires_grad_();
    const Tensors outputs = checkpoint(
        [](const Tensors& x) {
          return Tensors{x[0] * x[1], x[0] + 1};
        },
        Tensors{a, b});
    (outputs[0].sum() + 2 * outputs[1].sum()).backward();
    EXPECT_TRUE(close(a.grad(), b + 2));
    EXPECT_TRUE(close(b.grad(), a));
  });
}

TEST_F(CheckpointTest, WithoutGradientsItOnlyRuns) {
  run_ranks(1, [](int) {
    int runs = 0;
    const at::NoGradGuard no_grad;
    const at::Tensor output = checkpoint(
        [&](const at::Tensor& x) {
          ++runs;
          return x * 2;
        },
        randn({3}).requires_grad_());
    EXPECT_EQ(runs, 1);
    EXPECT_FALSE(output.requires_grad());
  });
}

TEST_F(CheckpointTest, ParametersGetGradientsThoughNoInputRequiresOne) {
  run_ranks(1, [](int) {
    const at::Tensor input = randn({3});
    const at::Tensor weight = randn({3}).requires_grad_();
    checkpoint([&](const at::Tensor& x) { return x * weight; }, input).sum().backward();
    EXPECT_TRUE(close(weight.grad(), input));
  });
}

TEST_F(CheckpointTest, WhatItCannotDoIsAnError) {
  run_ranks(1, [](int) {
    const auto twice = [](const at::Tensor& x) { return x * 2; };
    const at::Tensor input = randn({3}).requires_grad_();
    EXPECT_THAT(message_of<UserError>(
                    [&] { torch::autograd::grad({checkpoint(twice, input).sum()}, {input}); }),
                HasSubstr("torch::autograd::grad()"));
    EXPECT_THAT(message_of<UserError>([&] {
                  checkpoint(twice, input).sum().backward({}, true, /*create_graph=*/true);
                }),
                HasSubstr("create_graph"));
    int runs = 0;
    const auto fickle = [&](const Tensors& x) {
      return ++runs == 1 ? Tensors{x[0] * 2} : Tensors{x[0] * 2, x[0]};
    };
    EXPECT_THAT(
        message_of<UserError>([&] { checkpoint(fickle, Tensors{input})[0].sum().backward(); }),
        HasSubstr("1 outputs at first and 2"));
  });
}

}  // namespace
