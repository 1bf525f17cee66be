// SyncBatchNorm with fused ReLU and addition, against the separate operations.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <limits>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/sequential.h>

#include "dist/device.h"
#include "dist/group.h"
#include "dist/tensors.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace test = syncbn::test;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::device;
using syncbn::test::exchanges;
using syncbn::test::on_device;
using syncbn::test::run_group;
using syncbn::test::run_on_device;
using FusedBatchNormTest = syncbn::test::DeviceTest;

/// The same bits on the CPU. On a GPU, ATen's operators do not promise the order of summation, so
/// allow for the rounding of another order.
::testing::AssertionResult same(const at::Tensor& actual, const at::Tensor& expected) {
  const auto bound = [&] {
    if (device().is_cpu()) return 0.0;
    switch (actual.scalar_type()) {
      case at::kDouble:
        return 1e-12;
      case at::kFloat:
        return 1e-5;
      case at::kHalf:
        return 2e-3;
      default:
        return 2e-2;
    }
  }();
  return close(actual, expected, bound, bound);
}

struct FusedCase {
  bool relu = false;
  bool add = false;
  bool training = true;
  at::ScalarType type = at::kFloat;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  std::vector<int64_t> sizes = {4, 3, 5, 5};
};

void expect_as_apart(const FusedCase& c) {
  SyncBatchNorm fused =
      on_device(SyncBatchNorm(SyncBatchNormOptions(c.sizes[1]).fuse_relu(c.relu)));
  SyncBatchNorm apart = on_device(SyncBatchNorm(SyncBatchNormOptions(c.sizes[1])));
  at::manual_seed(10 + static_cast<uint64_t>(dist::rank()));
  const auto random = [&] { return test::randn(c.sizes).to(c.type).contiguous(c.format); };
  const at::Tensor input = random();
  const at::Tensor residual = random();
  const at::Tensor gradient = random();
  // The fused kernels compute in float32 or better and round once, so the separate operations do
  // here as well. Not on a GPU, where ATen's operators are separate in either case.
  const bool rounded_once =
      device().is_cpu() && c.training && (c.type == at::kBFloat16 || c.type == at::kHalf);
  const at::ScalarType wide = rounded_once ? at::kFloat : c.type;
  const auto leaf = [](const at::Tensor& t) { return t.detach().clone().requires_grad_(); };
  const at::Tensor x[] = {leaf(input), leaf(input.to(wide))};
  const at::Tensor z[] = {leaf(residual), leaf(residual.to(wide))};
  fused->train(c.training);
  apart->train(c.training);

  const at::Tensor actual = c.add ? fused(x[0], z[0]) : fused(x[0]);
  at::Tensor expected = apart(x[1]);
  if (c.add) expected = expected + z[1];
  if (c.relu) expected = at::relu(expected);
  EXPECT_EQ(actual.scalar_type(), c.type);
  EXPECT_TRUE(same(actual, expected.to(c.type)));
  EXPECT_TRUE(actual.is_contiguous(c.format));
  actual.backward(gradient);
  expected.backward(gradient.to(wide));
  EXPECT_TRUE(same(x[0].grad(), x[1].grad().to(c.type)));
  if (c.add) {
    EXPECT_TRUE(same(z[0].grad(), z[1].grad().to(c.type)));
  }
  EXPECT_TRUE(same(fused->weight.grad(), apart->weight.grad()));
  EXPECT_TRUE(same(fused->bias.grad(), apart->bias.grad()));
  EXPECT_TRUE(same(fused->running_var, apart->running_var));
}

void expect_all_as_apart() {
  for (const bool relu : {false, true}) {
    for (const bool add : {false, true}) {
      expect_as_apart({.relu = relu, .add = add});
      expect_as_apart({.relu = relu, .add = add, .training = false});
      expect_as_apart({.relu = relu, .add = add, .format = at::MemoryFormat::ChannelsLast});
      expect_as_apart({.relu = relu, .add = add, .type = at::kDouble});
      expect_as_apart({.relu = relu, .add = add, .type = at::kBFloat16});
      expect_as_apart({.relu = relu, .add = add, .type = at::kHalf});
      for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast3d}) {
        for (const auto type : {at::kFloat, at::kHalf}) {
          expect_as_apart(
              {.relu = relu, .add = add, .type = type, .format = format, .sizes = {3, 5, 4, 3, 7}});
        }
      }
      // More values and rows than the kernels process at once, and not multiples of what they do.
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

// Above 1 MiB, results bypass the cache if planes and rows are whole vectors; rows are then divided
// into several tasks.
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

TEST(FusedBatchNormOnCpuTest, EqualsThemWhereResultsGoPastTheCache) {
  for (const int ranks : {1, 2}) {
    run_group(ranks, [](int) { expect_large_ones_as_apart(); });
  }
}

// The backward uses a mask of the ReLU, not its output, so the next operation may overwrite that.
TEST(FusedBatchNormOnCpuTest, TheOutputMayBeChangedInPlace) {
  for (const int ranks : {1, 2}) {
    run_group(ranks, [](int) {
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

TEST_F(FusedBatchNormTest, AResidualOnAnotherDeviceIsRefused) {
  run_on_device(1, [](int) {
    auto layer = on_device(SyncBatchNorm(SyncBatchNormOptions(3)));
    const at::Tensor input = test::randn({4, 3});
    EXPECT_THAT(
        test::message_of<syncbn::base::UserError>([&] { layer(input, input.to(at::kMeta)); }),
        ::testing::HasSubstr("the residual is on meta, the input on "));
  });
}

// Only the residual needs a gradient: the backward has no second pass.
TEST_F(FusedBatchNormTest, GivesTheResidualAGradientWhereTheInputNeedsNone) {
  for (const int ranks : {1, 2}) {
    run_on_device(ranks, [](int) {
      SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(3).fuse_relu(true)));
      const at::Tensor input = test::randn({4, 3, 5, 5});
      const at::Tensor residual = test::randn({4, 3, 5, 5}).requires_grad_();
      const at::Tensor gradient = test::randn({4, 3, 5, 5});
      const at::Tensor output = layer(input, residual);
      output.backward(gradient);
      EXPECT_TRUE(residual.grad().equal(gradient * (output > 0)));
    });
  }
}

// A pruning may have removed all channels: nothing to normalise, and no error.
TEST_F(FusedBatchNormTest, TakesNoChannelsAtAll) {
  run_on_device(2, [](int) {
    SyncBatchNorm layer(
        SyncBatchNormOptions(8).affine(false).track_running_stats(false).fuse_relu(true));
    const at::Tensor input = test::zeros({4, 0}).requires_grad_();
    layer(input).sum().backward();
    EXPECT_EQ(input.grad().sizes(), input.sizes());
  });
}

TEST_F(FusedBatchNormTest, EqualsTheLayerAndTheOthersApart) {
  run_on_device(2, [](int) { expect_all_as_apart(); });
}

TEST_F(FusedBatchNormTest, EqualsThemInAWorldOfOne) {
  run_on_device(1, [](int) { expect_all_as_apart(); });
}

TEST_F(FusedBatchNormTest, TakesAResidualOfAnotherMemoryFormat) {
  run_on_device(1, [](int) {
    SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(3).fuse_relu(true)));
    const at::Tensor input = test::randn({2, 3, 4, 4});
    const at::Tensor residual = test::randn({2, 3, 4, 4});
    const at::Tensor expected = layer(input, residual);
    EXPECT_TRUE(same(layer(input, residual.contiguous(at::MemoryFormat::ChannelsLast)), expected));
    EXPECT_TRUE(same(layer(input, residual.transpose(2, 3).clone().transpose(2, 3)), expected));
  });
}

TEST_F(FusedBatchNormTest, LetsNanPassAsReluDoes) {
  run_on_device(1, [](int) {
    SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(2).fuse_relu(true)));
    at::Tensor input = test::randn({40, 2});
    input[7][1] = std::numeric_limits<float>::quiet_NaN();
    const at::Tensor output = layer(input);
    EXPECT_TRUE(output.select(1, 1).isnan().all().item<bool>());
    EXPECT_FALSE(output.select(1, 0).isnan().any().item<bool>());
  });
}

TEST_F(FusedBatchNormTest, ExchangesNoMoreThanTheLayer) {
  run_on_device(2, [](int) {
    SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(3).fuse_relu(true)));
    const uint64_t before = exchanges();
    layer(test::randn({4, 3}).requires_grad_(), test::randn({4, 3}).requires_grad_())
        .sum()
        .backward();
    EXPECT_EQ(exchanges(), before + 2);
  });
}

TEST_F(FusedBatchNormTest, GoesIntoASequential) {
  run_on_device(2, [](int) {
    torch::nn::Sequential net =
        on_device(torch::nn::Sequential(SyncBatchNorm(SyncBatchNormOptions(3).fuse_relu(true))));
    const at::Tensor output = net->forward(test::randn({4, 3}));
    EXPECT_TRUE(output.equal(at::relu(output)));
  });
}

TEST_F(FusedBatchNormTest, AnEmptyRankTakesPart) {
  run_on_device(3, [](int rank) {
    at::manual_seed(2);
    const std::vector<int64_t> shares{4, 0, 3};
    const auto own = [&](const at::Tensor& all) {
      return all.split_with_sizes(shares)[static_cast<size_t>(rank)];
    };
    const auto leaf = [](const at::Tensor& tensor) { return tensor.clone().requires_grad_(); };
    const auto random = [] { return at::randn({7, 3, 2}, at::kDouble); };
    const at::Tensor x = leaf(random()), z = leaf(random()), gradient = random();
    const at::Tensor weight = leaf(at::randn({3}, at::kDouble) + 2);
    const at::Tensor bias = leaf(at::randn({3}, at::kDouble));
    const at::Tensor mean = at::zeros({3}, at::kDouble), var = at::ones({3}, at::kDouble);
    const at::Tensor expected =
        at::relu(at::batch_norm(x, weight, bias, mean, var, true, 0.1, 1e-5, false) + z);
    expected.backward(gradient);

    SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(3).fuse_relu(true)));
    {
      const at::NoGradGuard no_grad;
      layer->weight.copy_(weight);
      layer->bias.copy_(bias);
    }
    const auto in_float = [&](const at::Tensor& all) {
      return own(all.detach()).to(device(), at::kFloat);
    };
    const at::Tensor input = leaf(in_float(x));
    const at::Tensor residual = leaf(in_float(z));
    const at::Tensor output = layer(input, residual);
    output.backward(in_float(gradient));
    const auto sum = [](const at::Tensor& part) {
      at::Tensor all = part.clone();
      dist::all_reduce(all);
      return all;
    };
    EXPECT_TRUE(close(output, own(expected), 1e-5, 1e-5));
    EXPECT_TRUE(close(input.grad(), own(x.grad()), 1e-5, 1e-5));
    EXPECT_TRUE(close(residual.grad(), own(z.grad())));
    EXPECT_TRUE(close(sum(layer->weight.grad()), weight.grad(), 1e-5, 1e-5));
    EXPECT_TRUE(close(sum(layer->bias.grad()), bias.grad(), 1e-5, 1e-5));
    EXPECT_TRUE(close(layer->running_mean, mean));
    EXPECT_TRUE(close(layer->running_var, var));
  });
}

}  // namespace
