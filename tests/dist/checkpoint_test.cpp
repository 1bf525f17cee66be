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
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "dist/tensors.h"
#include "groups/world.h"
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
using syncbn::test::message_of;
using syncbn::test::run_ranks;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

uint64_t exchanges() {
  return dist::detail::backend_of(dist::detail::statistics_group({}))->sequence();
}

/// Two layers of either kind; cumulative ones, where a second update would show most.
struct NetImpl : nn::Module {
  explicit NetImpl(bool recompute, bool converted) : recompute(recompute) {
    at::manual_seed(1);
    linear = register_module("linear", nn::Linear(3, 3));
    const auto layer = [&]() -> nn::Sequential {
      if (converted) {
        return nn::Sequential(nn::Linear(3, 3),
                              nn::BatchNorm1d(nn::BatchNormOptions(3).momentum(std::nullopt)));
      }
      return nn::Sequential(nn::Linear(3, 3),
                            SyncBatchNorm(SyncBatchNormOptions(3).momentum(std::nullopt)));
    };
    first = register_module("first", layer());
    second = register_module("second", layer());
    if (converted) dist::convert_sync_batchnorm(*this);
  }

  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = linear(input);
    const auto stretch = [this](const at::Tensor& y) {
      return second->forward(first->forward(y).sigmoid());
    };
    return recompute ? checkpoint(stretch, x) : stretch(x);
  }

  bool recompute;
  nn::Linear linear{nullptr};
  nn::Sequential first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

void expect_equal(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  // In a world of one a converted layer is libtorch's, but for its statistics in a checkpoint.
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(close(actual[i], expected[i], 1e-4, 1e-4)) << i;
  }
}

Tensors gradients(const nn::Module& module) {
  Tensors all;
  for (const at::Tensor& parameter : module.parameters()) all.push_back(parameter.grad());
  return all;
}

void expect_as_without(bool converted) {
  Net plain(false, converted);
  Net recomputing(true, converted);
  at::manual_seed(7 + static_cast<uint64_t>(dist::rank()));
  for (int step = 0; step < 3; ++step) {
    const at::Tensor batch = at::randn({4, 3});
    plain(batch).pow(3).sum().backward();
    recomputing(batch).pow(3).sum().backward();
    expect_equal(gradients(*recomputing), gradients(*plain));
    expect_equal(recomputing->buffers(), plain->buffers());
  }
}

TEST(CheckpointTest, GivesTheSameGradientsAndRunningStatistics) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    expect_as_without(/*converted=*/false);
  });
}

TEST(CheckpointTest, GivesTheSameForConvertedLayers) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    expect_as_without(/*converted=*/true);
  });
}

TEST(CheckpointTest, GivesTheSameInAWorldOfOne) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    expect_as_without(/*converted=*/false);
    expect_as_without(/*converted=*/true);
  });
}

TEST(CheckpointTest, ExchangesNothingMore) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    Net net(/*recompute=*/true, /*converted=*/false);
    exchanges();
    uint64_t before = exchanges();
    const at::Tensor output = net(at::randn({4, 3}));
    EXPECT_EQ(exchanges() - before, 2u);
    before = exchanges();
    output.sum().backward();
    EXPECT_EQ(exchanges() - before, 2u);
  });
}

TEST(CheckpointTest, WorksInsideDdp) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    for (const bool static_graph : {false, true}) {
      Net plain(false, false);
      Net recomputing(true, false);
      dist::DistributedDataParallel<NetImpl> expected(plain);
      dist::DistributedDataParallel<NetImpl> actual(recomputing, {.static_graph = static_graph});
      at::manual_seed(static_cast<uint64_t>(rank));
      for (int step = 0; step < 3; ++step) {
        const at::Tensor batch = at::randn({4, 3});
        expected(batch).pow(3).sum().backward();
        actual(batch).pow(3).sum().backward();
        expect_equal(gradients(*recomputing), gradients(*plain));
      }
    }
  });
}

TEST(CheckpointTest, CallsNest) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    Net net(/*recompute=*/true, /*converted=*/false);
    Net plain(/*recompute=*/false, /*converted=*/false);
    const at::Tensor batch = at::randn({4, 3});
    const at::Tensor inner = batch.clone().requires_grad_();
    exchanges();
    const uint64_t before = exchanges();
    checkpoint([&](const at::Tensor& x) { return net(x); }, inner).pow(3).sum().backward();
    EXPECT_EQ(exchanges() - before, 4u);
    plain(batch).pow(3).sum().backward();
    expect_equal(gradients(*net), gradients(*plain));
    expect_equal(net->buffers(), plain->buffers());
  });
}

TEST(CheckpointTest, DropsTheSameValuesBothTimes) {
  at::manual_seed(3);
  const at::Tensor input = at::randn({100}).requires_grad_();
  const auto drop = [](const at::Tensor& x) { return at::dropout(x, 0.5, true); };
  const at::Tensor output = checkpoint(drop, input);
  const at::Tensor next = at::randn({3});
  output.sum().backward();
  EXPECT_TRUE(close(input.grad() * input, output));
  // And what is drawn outside goes on as if nothing had happened.
  const at::Tensor after = at::randn({3});
  at::manual_seed(3);
  at::randn({100});
  at::dropout(input, 0.5, true);
  EXPECT_TRUE(at::randn({3}).equal(next));
  EXPECT_TRUE(at::randn({3}).equal(after));
}

TEST(CheckpointTest, RecomputesUnderTheSameAutocast) {
  std::vector<at::ScalarType> seen;
  const at::Tensor weight = at::randn({3, 3});
  const auto multiply = [&](const at::Tensor& x) {
    at::Tensor product = x.matmul(weight);
    seen.push_back(product.scalar_type());
    return product;
  };
  const at::Tensor input = at::randn({2, 3}).requires_grad_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor output = checkpoint(multiply, input);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  output.sum().backward();
  EXPECT_THAT(seen, ::testing::ElementsAre(at::kBFloat16, at::kBFloat16));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(CheckpointTest, TakesSeveralInputsAndOutputs) {
  const at::Tensor a = at::randn({3}).requires_grad_();
  const at::Tensor b = at::randn({3}).requires_grad_();
  const Tensors outputs = checkpoint(
      [](const Tensors& x) {
        return Tensors{x[0] * x[1], x[0] + 1};
      },
      Tensors{a, b});
  (outputs[0].sum() + 2 * outputs[1].sum()).backward();
  EXPECT_TRUE(close(a.grad(), b + 2));
  EXPECT_TRUE(close(b.grad(), a));
}

TEST(CheckpointTest, WithoutGradientsItOnlyRuns) {
  int runs = 0;
  const at::NoGradGuard no_grad;
  const at::Tensor output = checkpoint(
      [&](const at::Tensor& x) {
        ++runs;
        return x * 2;
      },
      at::randn({3}).requires_grad_());
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(output.requires_grad());
}

TEST(CheckpointTest, WhatItCannotDoIsAnError) {
  const auto twice = [](const at::Tensor& x) { return x * 2; };
  const at::Tensor input = at::randn({3}).requires_grad_();
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
}

}  // namespace
