// ReLU and addition fused into SyncBatchNorm, against the same apart.

#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <limits>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/sequential.h>

#include "groups/world.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::run_ranks;

struct Case {
  bool relu = false;
  bool add = false;
  bool training = true;
  at::ScalarType type = at::kFloat;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  std::vector<int64_t> sizes = {4, 3, 5, 5};
};

void expect_as_apart(const Case& c) {
  SyncBatchNorm fused(SyncBatchNormOptions(c.sizes[1]).fuse_relu(c.relu));
  SyncBatchNorm apart(SyncBatchNormOptions(c.sizes[1]));
  at::manual_seed(10 + static_cast<uint64_t>(dist::rank()));
  const auto random = [&] { return at::randn(c.sizes).to(c.type).contiguous(c.format); };
  const at::Tensor input = random();
  const at::Tensor residual = random();
  const at::Tensor gradient = random();
  // Fused, all is computed in float32 or better and rounded once; so are the others here.
  const at::ScalarType wide = c.training && c.type == at::kBFloat16 ? at::kFloat : c.type;
  const auto leaf = [](const at::Tensor& t) { return t.detach().clone().requires_grad_(); };
  const at::Tensor x[] = {leaf(input), leaf(input.to(wide))};
  const at::Tensor z[] = {leaf(residual), leaf(residual.to(wide))};
  fused->train(c.training);
  apart->train(c.training);

  const at::Tensor actual = c.add ? fused(x[0], z[0]) : fused(x[0]);
  at::Tensor expected = apart(x[1]);
  if (c.add) expected = expected + z[1];
  if (c.relu) expected = at::relu(expected);
  EXPECT_TRUE(actual.equal(expected.to(c.type)));
  EXPECT_TRUE(actual.is_contiguous(c.format));
  actual.backward(gradient);
  expected.backward(gradient.to(wide));
  EXPECT_TRUE(x[0].grad().equal(x[1].grad().to(c.type)));
  if (c.add) {
    EXPECT_TRUE(z[0].grad().equal(z[1].grad().to(c.type)));
  }
  EXPECT_TRUE(fused->weight.grad().equal(apart->weight.grad()));
  EXPECT_TRUE(fused->bias.grad().equal(apart->bias.grad()));
  EXPECT_TRUE(fused->running_var.equal(apart->running_var));
}

void expect_all_as_apart() {
  for (const bool relu : {false, true}) {
    for (const bool add : {false, true}) {
      expect_as_apart({.relu = relu, .add = add});
      expect_as_apart({.relu = relu, .add = add, .training = false});
      expect_as_apart({.relu = relu, .add = add, .format = at::MemoryFormat::ChannelsLast});
      expect_as_apart({.relu = relu, .add = add, .type = at::kDouble});
      expect_as_apart({.relu = relu, .add = add, .type = at::kBFloat16});
      // More values and rows than the kernels take at once, and no multiple of what they do.
      const std::vector<int64_t> large{3, 5, 37, 31};
      expect_as_apart({.relu = relu, .add = add, .sizes = large});
      expect_as_apart(
          {.relu = relu, .add = add, .format = at::MemoryFormat::ChannelsLast, .sizes = large});
      expect_as_apart({.relu = relu,
                       .add = add,
                       .format = at::MemoryFormat::ChannelsLast,
                       .sizes = {7, 41, 5, 5}});
    }
  }
}

// Above 1 MiB, results go past the cache where planes and rows are whole vectors; rows are several
// tasks.
void expect_large_ones_as_apart() {
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{2, 8, 160, 208}, std::vector<int64_t>{2, 3, 613, 601}}) {
    for (const bool add : {false, true}) {
      for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
        for (const auto type : {at::kFloat, at::kDouble}) {
          expect_as_apart(
              {.relu = true, .add = add, .type = type, .format = format, .sizes = sizes});
        }
      }
    }
  }
}

TEST(FusedBatchNormTest, EqualsThemWhereResultsGoPastTheCache) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [](int) {
      dist::init_process_group();
      expect_large_ones_as_apart();
    });
  }
}

// What the backward needs of the ReLU is not its output, which the next operation may overwrite.
TEST(FusedBatchNormTest, TheOutputMayBeChangedInPlace) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [](int) {
      dist::init_process_group();
      SyncBatchNorm layer(SyncBatchNormOptions(3).fuse_relu(true));
      const at::Tensor kept = at::randn({4, 3, 5, 5}).requires_grad_();
      const at::Tensor changed = kept.detach().clone().requires_grad_();
      const at::Tensor gradient = at::randn({4, 3, 5, 5});
      (layer(kept) * 2).backward(gradient);
      layer(changed).mul_(2).backward(gradient);
      EXPECT_TRUE(changed.grad().equal(kept.grad()));
    });
  }
}

// Of the residual alone: no gradient of the input, no second pass.
TEST(FusedBatchNormTest, GivesTheResidualAGradientWhereTheInputNeedsNone) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [](int) {
      dist::init_process_group();
      SyncBatchNorm layer(SyncBatchNormOptions(3).fuse_relu(true));
      const at::Tensor input = at::randn({4, 3, 5, 5});
      const at::Tensor residual = at::randn({4, 3, 5, 5}).requires_grad_();
      const at::Tensor gradient = at::randn({4, 3, 5, 5});
      const at::Tensor output = layer(input, residual);
      output.backward(gradient);
      EXPECT_TRUE(residual.grad().equal(gradient * (output > 0)));
    });
  }
}

// All that was pruned: nothing to normalise, and nothing to fall over.
TEST(FusedBatchNormTest, TakesNoChannelsAtAll) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(
        SyncBatchNormOptions(8).affine(false).track_running_stats(false).fuse_relu(true));
    const at::Tensor input = at::zeros({4, 0}).requires_grad_();
    layer(input).sum().backward();
    EXPECT_EQ(input.grad().sizes(), input.sizes());
  });
}

TEST(FusedBatchNormTest, EqualsTheLayerAndTheOthersApart) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    expect_all_as_apart();
  });
}

TEST(FusedBatchNormTest, EqualsThemInAWorldOfOne) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    expect_all_as_apart();
  });
}

TEST(FusedBatchNormTest, TakesAResidualOfAnotherMemoryFormat) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(3).fuse_relu(true));
    const at::Tensor input = at::randn({2, 3, 4, 4});
    const at::Tensor residual = at::randn({2, 3, 4, 4});
    const at::Tensor expected = layer(input, residual);
    EXPECT_TRUE(layer(input, residual.contiguous(at::MemoryFormat::ChannelsLast)).equal(expected));
    EXPECT_TRUE(layer(input, residual.transpose(2, 3).clone().transpose(2, 3)).equal(expected));
  });
}

TEST(FusedBatchNormTest, LetsNanPassAsReluDoes) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(2).fuse_relu(true));
    at::Tensor input = at::randn({40, 2});
    input[7][1] = std::numeric_limits<float>::quiet_NaN();
    const at::Tensor output = layer(input);
    EXPECT_TRUE(output.select(1, 1).isnan().all().item<bool>());
    EXPECT_FALSE(output.select(1, 0).isnan().any().item<bool>());
  });
}

TEST(FusedBatchNormTest, ExchangesNoMoreThanTheLayer) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    auto* backend = dist::detail::backend_of(dist::detail::statistics_group({}));
    SyncBatchNorm layer(SyncBatchNormOptions(3).fuse_relu(true));
    const uint64_t before = backend->sequence();
    layer(at::randn({4, 3}).requires_grad_(), at::randn({4, 3}).requires_grad_()).sum().backward();
    EXPECT_EQ(backend->sequence(), before + 2);
  });
}

TEST(FusedBatchNormTest, GoesIntoASequential) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    torch::nn::Sequential net(SyncBatchNorm(SyncBatchNormOptions(3).fuse_relu(true)));
    const at::Tensor output = net->forward(at::randn({4, 3}));
    EXPECT_TRUE(output.equal(at::relu(output)));
  });
}

TEST(FusedBatchNormTest, AnEmptyRankTakesPart) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(3).fuse_relu(true));
    const at::Tensor input = at::randn({int64_t{4} * rank, 3}).requires_grad_();
    const at::Tensor residual = at::randn({int64_t{4} * rank, 3}).requires_grad_();
    layer(input, residual).sum().backward();
    EXPECT_EQ(input.grad().sizes(), input.sizes());
    EXPECT_EQ(residual.grad().sizes(), residual.sizes());
  });
}

}  // namespace
