#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "dist/tensors.h"
#include "groups/world.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::run_ranks;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// What one process computes on the whole batch, in float64.
struct Reference {
  at::Tensor output, grad_input, grad_weight, grad_bias, running_mean, running_var;
};

Reference whole_batch(const at::Tensor& input, const at::Tensor& grad_output,
                      const at::Tensor& weight, const at::Tensor& bias, double momentum,
                      double eps) {
  const at::Tensor x = input.detach().to(at::kDouble).requires_grad_();
  const at::Tensor w = weight.detach().to(at::kDouble).requires_grad_();
  const at::Tensor b = bias.detach().to(at::kDouble).requires_grad_();
  Reference result;
  result.running_mean = at::zeros({x.size(1)}, at::kDouble);
  result.running_var = at::ones({x.size(1)}, at::kDouble);
  result.output =
      at::batch_norm(x, w, b, result.running_mean, result.running_var, true, momentum, eps, false);
  result.output.backward(grad_output.to(at::kDouble));
  result.grad_input = x.grad();
  result.grad_weight = w.grad();
  result.grad_bias = b.grad();
  return result;
}

/// One layer on shards of the batch against the whole batch.
struct Case {
  std::vector<int64_t> shares;              ///< samples of each rank
  std::vector<int64_t> sample = {5, 4, 3};  ///< [C, ...]
  at::ScalarType type = at::kFloat;
  bool channels_last = false;
  double mean = 0.5;
  double stddev = 2.0;
  double eps = 1e-5;
  double rtol = 1e-5;
  double atol = 2e-6;
};

void expect_as_whole_batch(const Case& c, int rank) {
  at::manual_seed(7);
  std::vector<int64_t> sizes{std::accumulate(c.shares.begin(), c.shares.end(), int64_t{0})};
  sizes.insert(sizes.end(), c.sample.begin(), c.sample.end());
  const int64_t channels = c.sample[0];
  at::Tensor batch = (at::randn(sizes, at::kDouble) * c.stddev + c.mean).to(c.type);
  at::Tensor grad_batch = at::randn(sizes, at::kDouble).to(c.type);
  const at::Tensor weight = at::randn({channels}) + 2;
  const at::Tensor bias = at::randn({channels});
  const Reference expected = whole_batch(batch, grad_batch, weight, bias, 0.1, c.eps);

  SyncBatchNorm layer(SyncBatchNormOptions(channels).eps(c.eps));
  layer->to(c.type == at::kDouble ? at::kDouble : at::kFloat);
  {
    const at::NoGradGuard no_grad;
    layer->weight.copy_(weight);
    layer->bias.copy_(bias);
  }
  const auto at_rank = static_cast<size_t>(rank);
  const int64_t begin = std::accumulate(c.shares.begin(), c.shares.begin() + rank, int64_t{0});
  const auto share = [&](const at::Tensor& whole) {
    at::Tensor own = whole.narrow(0, begin, c.shares[at_rank]).clone();
    if (!c.channels_last) return own;
    return own.contiguous(own.dim() == 5 ? at::MemoryFormat::ChannelsLast3d
                                         : at::MemoryFormat::ChannelsLast);
  };
  const at::Tensor input = share(batch).requires_grad_();
  const at::Tensor output = layer->forward(input);
  output.backward(share(grad_batch));

  EXPECT_EQ(output.scalar_type(), c.type);
  if (c.channels_last && c.shares[at_rank] > 0) {
    EXPECT_EQ(output.suggest_memory_format(), input.suggest_memory_format());
  }
  EXPECT_TRUE(close(output, share(expected.output), c.rtol, c.atol));
  // A gradient grows with 1 / stddev, and so does what cancels in it.
  const double scale = std::max(1.0, expected.grad_input.abs().max().item<double>());
  EXPECT_TRUE(close(input.grad(), share(expected.grad_input), c.rtol, c.atol * scale));
  // Parameters' gradients are local sums; DDP averages them.
  at::Tensor grad_weight = layer->weight.grad().to(at::kDouble);
  at::Tensor grad_bias = layer->bias.grad().to(at::kDouble);
  dist::all_reduce(grad_weight);
  dist::all_reduce(grad_bias);
  EXPECT_TRUE(close(grad_weight, expected.grad_weight, 10 * c.rtol, 100 * c.atol));
  EXPECT_TRUE(close(grad_bias, expected.grad_bias, 10 * c.rtol, 100 * c.atol));
  EXPECT_TRUE(close(layer->running_mean, expected.running_mean, 1e-6, 1e-7));
  EXPECT_TRUE(close(layer->running_var, expected.running_var, 1e-6, 1e-7));
  EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 1);
}

void expect_as_whole_batch(const Case& c) {
  run_ranks(static_cast<int>(c.shares.size()), [&c](int rank) {
    dist::init_process_group({.backend = "gloo"});
    expect_as_whole_batch(c, rank);
  });
}

TEST(SyncBatchNormTest, EqualsBatchNorm1dOnTheWholeBatchFor2dInput) {
  expect_as_whole_batch({.shares = {6, 6}, .sample = {7}});
}

TEST(SyncBatchNormTest, EqualsBatchNorm1dOnTheWholeBatchFor3dInput) {
  expect_as_whole_batch({.shares = {4, 4}, .sample = {7, 9}});
}

TEST(SyncBatchNormTest, EqualsBatchNorm2dOnTheWholeBatch) {
  expect_as_whole_batch({.shares = {4, 4}, .sample = {6, 33, 40}});
}

TEST(SyncBatchNormTest, EqualsBatchNorm2dOnTheWholeBatchInChannelsLast) {
  expect_as_whole_batch({.shares = {4, 4}, .sample = {6, 33, 40}, .channels_last = true});
}

TEST(SyncBatchNormTest, EqualsBatchNorm3dOnTheWholeBatch) {
  expect_as_whole_batch({.shares = {3, 3}, .sample = {5, 4, 6, 7}});
}

TEST(SyncBatchNormTest, EqualsBatchNorm3dOnTheWholeBatchInChannelsLast) {
  expect_as_whole_batch({.shares = {3, 3}, .sample = {5, 4, 6, 7}, .channels_last = true});
}

// Rows of several cache lines and what is left of one; blocks of rows, and one that is cut short.
TEST(SyncBatchNormTest, EqualsBatchNormOnTheWholeBatchForWideRows) {
  expect_as_whole_batch({.shares = {70, 61}, .sample = {37}});
  expect_as_whole_batch({.shares = {2, 3}, .sample = {53, 13, 11}, .channels_last = true});
  expect_as_whole_batch({.shares = {2, 0}, .sample = {37, 13, 11}, .channels_last = true});
  expect_as_whole_batch({.shares = {2, 3},
                         .sample = {29, 13, 11},
                         .type = at::kDouble,
                         .channels_last = true,
                         .rtol = 1e-12,
                         .atol = 1e-13});
}

// Above 1 MiB, where planes and rows are whole vectors; and where they are not, which go through
// it.
TEST(SyncBatchNormTest, EqualsBatchNormOnTheWholeBatchWhereResultsGoPastTheCache) {
  for (const std::vector<int64_t>& sample :
       {std::vector<int64_t>{8, 160, 208}, std::vector<int64_t>{3, 613, 601}}) {
    for (const bool channels_last : {false, true}) {
      Case c{.shares = {1, 1},
             .sample = sample,
             .channels_last = channels_last,
             .rtol = 1e-4,
             .atol = 1e-5};
      expect_as_whole_batch(c);
      c.shares = {1};
      expect_as_whole_batch(c);
      c.type = at::kDouble;
      c.rtol = 1e-9;
      c.atol = 1e-10;
      expect_as_whole_batch(c);
    }
  }
}

// Messages that are gathered at once, forward and backward, forward only, and not at all: 256 KiB
// of all ranks together, with 2 C + 4 numbers forward and 2 C + 6 backward.
TEST(SyncBatchNormTest, EqualsBatchNormOnTheWholeBatchForMessagesOfAnySize) {
  for (const int64_t channels : {8189, 8190, 20000}) {
    expect_as_whole_batch({.shares = {3, 2}, .sample = {channels}, .rtol = 1e-4, .atol = 1e-5});
  }
  expect_as_whole_batch({.shares = {1, 2, 0, 2}, .sample = {5000}, .rtol = 1e-4, .atol = 1e-5});
}

TEST(SyncBatchNormTest, IsExactToFloat64InFloat64) {
  expect_as_whole_batch(
      {.shares = {4, 2}, .sample = {5, 11}, .type = at::kDouble, .rtol = 1e-12, .atol = 1e-13});
}

TEST(SyncBatchNormTest, TakesHalfPrecisionInputs) {
  expect_as_whole_batch(
      {.shares = {4, 4}, .sample = {5, 8, 8}, .type = at::kHalf, .rtol = 2e-3, .atol = 2e-3});
  expect_as_whole_batch(
      {.shares = {4, 4}, .sample = {5, 8, 8}, .type = at::kBFloat16, .rtol = 2e-2, .atol = 2e-2});
}

TEST(SyncBatchNormTest, IsExactForUnevenBatches) {
  expect_as_whole_batch({.shares = {1, 5, 2}});
}

TEST(SyncBatchNormTest, IsExactWhenARankHasNoSamples) {
  expect_as_whole_batch({.shares = {4, 0, 3}});
  expect_as_whole_batch({.shares = {0, 5}, .sample = {4}});
}

TEST(SyncBatchNormTest, WorksWithOneSampleARank) {
  expect_as_whole_batch({.shares = {1, 1, 1}, .sample = {6}});
}

TEST(SyncBatchNormTest, KeepsPrecisionWhenTheMeanIsLargeAgainstTheDeviation) {
  expect_as_whole_batch({.shares = {4, 4},
                         .sample = {3, 64, 64},
                         .mean = 1e3,
                         .stddev = 0.1,
                         .rtol = 2e-5,
                         .atol = 2e-5});
}

TEST(SyncBatchNormTest, KeepsPrecisionForTinyVariance) {
  expect_as_whole_batch({.shares = {4, 4},
                         .sample = {3, 16, 16},
                         .mean = 0,
                         .stddev = 1e-6,
                         .eps = 1e-14,
                         .rtol = 1e-4,
                         .atol = 1e-5});
}

TEST(SyncBatchNormTest, ExchangesOnceForwardAndOnceBackward) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    layer->forward(at::randn({4, 3, 2, 2}));  // makes the group
    auto* backend = dist::detail::backend_of(dist::detail::statistics_group({}));
    ASSERT_NE(backend, nullptr);
    const uint64_t before = backend->sequence();
    const at::Tensor output = layer->forward(at::randn({4, 3, 2, 2}).requires_grad_());
    EXPECT_EQ(backend->sequence(), before + 1);
    output.sum().backward();
    EXPECT_EQ(backend->sequence(), before + 2);
  });
}

TEST(SyncBatchNormTest, EvaluationUsesRunningStatisticsAndExchangesNothing) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(rank);
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    layer->forward(at::randn({4, 3, 2, 2}));
    layer->eval();
    auto* backend = dist::detail::backend_of(dist::detail::statistics_group({}));
    const uint64_t before = backend->sequence();
    const at::Tensor input = at::randn({4, 3, 2, 2});
    const at::Tensor expected =
        at::batch_norm(input, layer->weight, layer->bias, layer->running_mean, layer->running_var,
                       false, 0.0, 1e-5, false);
    EXPECT_TRUE(layer->forward(input).equal(expected));
    EXPECT_EQ(backend->sequence(), before);
  });
}

TEST(SyncBatchNormTest, WithoutMomentumAveragesAllBatches) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(3);
    SyncBatchNorm layer(SyncBatchNormOptions(2).momentum(std::nullopt));
    at::Tensor mean = at::zeros({2});
    for (int step = 0; step < 4; ++step) {
      const at::Tensor batch = at::randn({6, 2});
      mean += batch.mean(0) / 4;
      layer->forward(batch.narrow(0, int64_t{3} * rank, 3));
    }
    EXPECT_TRUE(close(layer->running_mean, mean));
  });
}

TEST(SyncBatchNormTest, RunningStatisticsMayBeOfAnyTypeAndLieApart) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(3);
    const at::Tensor batch = at::randn({6, 5}) * 3 + 1;
    const auto after_a_step = [&](at::ScalarType type, bool apart) {
      SyncBatchNorm layer(SyncBatchNormOptions(5).momentum(0.25));
      const auto other = [&](const at::Tensor& buffer) {
        return (apart ? buffer.unsqueeze(1).repeat({1, 2}).select(1, 0) : buffer).to(type);
      };
      layer->running_mean.set_data(other(layer->running_mean));
      layer->running_var.set_data(other(layer->running_var));
      EXPECT_EQ(layer->running_var.is_contiguous(), !apart || type != at::kFloat);
      layer->forward(batch.narrow(0, int64_t{3} * rank, 3));
      return std::vector{layer->running_mean, layer->running_var};
    };
    const std::vector expected{0.25 * batch.mean(0), 0.25 * batch.var(0) + 0.75};
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close(after_a_step(at::kFloat, false)[i], expected[i]));
      EXPECT_TRUE(close(after_a_step(at::kFloat, true)[i], expected[i]));
      EXPECT_TRUE(close(after_a_step(at::kDouble, false)[i], expected[i]));
      EXPECT_TRUE(close(after_a_step(at::kHalf, false)[i], expected[i], 1e-3, 1e-3));
      EXPECT_TRUE(close(after_a_step(at::kBFloat16, false)[i], expected[i], 1e-2, 1e-2));
    }
  });
}

// Module::to(dtype) makes a floating-point number of the counter.
TEST(SyncBatchNormTest, CountsBatchesAfterTheLayerWasMovedToAnotherType) {
  run_ranks(1, [](int) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf}) {
      SyncBatchNorm layer(SyncBatchNormOptions(2).momentum(std::nullopt));
      layer->to(type);
      at::Tensor mean = at::zeros({2}, at::kDouble);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor batch = at::randn({6, 2}).to(type);
        mean += batch.to(at::kDouble).mean(0) / 3;
        layer->forward(batch);
      }
      EXPECT_EQ(layer->num_batches_tracked.item<double>(), 3);
      EXPECT_TRUE(close(layer->running_mean, mean, 1e-2, 1e-3)) << type;
    }
  });
}

// They are written without operators of ATen's.
TEST(SyncBatchNormTest, AutogradSeesThatRunningStatisticsHaveChanged) {
  run_ranks(1, [](int) {
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    const at::Tensor input = at::randn({4, 3});
    for (const at::Tensor& buffer : {layer->running_mean, layer->running_var}) {
      const at::Tensor x = at::randn({3}).requires_grad_();
      const at::Tensor product = (x * buffer).sum();
      layer->forward(input);
      EXPECT_THAT([&] { product.backward(); },
                  ThrowsMessage<std::exception>(HasSubstr("modified by an inplace operation")));
    }
    const auto version = layer->num_batches_tracked._version();
    layer->forward(input);
    EXPECT_EQ(layer->num_batches_tracked._version(), version + 1);
  });
}

TEST(SyncBatchNormTest, RunningStatisticsFollowTheWholeBatchOverManySteps) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(5);
    SyncBatchNorm layer(SyncBatchNormOptions(3).momentum(0.99));
    at::Tensor mean = at::zeros({3});
    at::Tensor variance = at::ones({3});
    for (int step = 0; step < 100; ++step) {
      const at::Tensor batch = at::randn({5, 3, 4}) * (1 + step % 7) + step % 3;
      at::batch_norm(batch, {}, {}, mean, variance, true, 0.99, 1e-5, false);
      layer->forward(rank == 0 ? batch.narrow(0, 0, 2) : batch.narrow(0, 2, 3));
    }
    EXPECT_TRUE(close(layer->running_mean, mean));
    EXPECT_TRUE(close(layer->running_var, variance));
  });
}

TEST(SyncBatchNormTest, WorksWithoutAffineAndWithoutRunningStatistics) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(1);
    SyncBatchNorm layer(SyncBatchNormOptions(3).affine(false).track_running_stats(false));
    const at::Tensor batch = at::randn({6, 3});
    const at::Tensor expected = at::batch_norm(batch, {}, {}, {}, {}, true, 0.1, 1e-5, false);
    EXPECT_TRUE(close(layer->forward(batch.narrow(0, int64_t{3} * rank, 3)),
                      expected.narrow(0, int64_t{3} * rank, 3)));
    EXPECT_EQ(layer->named_parameters().size(), 0u);
    EXPECT_EQ(layer->named_buffers().size(), 0u);
  });
}

TEST(SyncBatchNormTest, GradientsOfSeveralForwardsAccumulate) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(4);
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    at::Tensor grad_weight = at::zeros({3}, at::kDouble);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor batch = at::randn({6, 3});
      const at::Tensor gradient = at::randn({6, 3});
      const Reference expected =
          whole_batch(batch, gradient, layer->weight, layer->bias, 0.1, 1e-5);
      layer(batch.narrow(0, int64_t{3} * rank, 3)).backward(gradient.narrow(0, 3L * rank, 3));
      grad_weight += expected.grad_weight;
    }
    at::Tensor actual = layer->weight.grad().clone();
    dist::all_reduce(actual);
    EXPECT_TRUE(close(actual, grad_weight, 1e-5, 1e-5));
  });
}

TEST(SyncBatchNormTest, ForwardsBeforeBackwardsKeepTheirOwnStatistics) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(4);
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    std::vector<at::Tensor> inputs, outputs, gradients;
    std::vector<Reference> expected;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor batch = at::randn({6, 3}) + i;
      gradients.push_back(at::randn({6, 3}));
      expected.push_back(
          whole_batch(batch, gradients.back(), layer->weight, layer->bias, 0.1, 1e-5));
      inputs.push_back(batch.narrow(0, 3L * rank, 3).clone().requires_grad_());
      outputs.push_back(layer(inputs.back()));
    }
    for (size_t i = 3; i-- > 0;) {
      outputs[i].backward(gradients[i].narrow(0, 3L * rank, 3));
      EXPECT_TRUE(close(inputs[i].grad(), expected[i].grad_input.narrow(0, 3L * rank, 3)));
    }
  });
}

TEST(SyncBatchNormTest, WorksUnderAutocast) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(6);
    const at::Tensor batch = at::randn({8, 5});
    const at::Tensor filter = at::randn({4, 5});
    SyncBatchNorm layer(SyncBatchNormOptions(4));
    SyncBatchNorm exact(SyncBatchNormOptions(4));
    const at::Tensor own = batch.narrow(0, 4L * rank, 4);
    const at::Tensor expected = exact(at::linear(own, filter));
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor input = at::linear(own, filter).requires_grad_();
    const at::Tensor output = layer(input);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(input.scalar_type(), at::kBFloat16);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    EXPECT_EQ(layer->running_mean.scalar_type(), at::kFloat);
    EXPECT_TRUE(close(output, expected, 2e-2, 3e-2));
    EXPECT_TRUE(close(layer->running_var, exact->running_var, 2e-2, 2e-2));
    output.sum().backward();
    EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
  });
}

TEST(SyncBatchNormTest, EvaluationBetweenForwardAndBackwardDisturbsNothing) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(4);
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    const at::Tensor batch = at::randn({6, 3});
    const at::Tensor gradient = at::randn({6, 3});
    const Reference expected = whole_batch(batch, gradient, layer->weight, layer->bias, 0.1, 1e-5);
    const at::Tensor input = batch.narrow(0, 3L * rank, 3).clone().requires_grad_();
    const at::Tensor output = layer(input);
    layer->eval();
    // Ranks evaluate as often as they like.
    for (int i = 0; i <= rank; ++i) layer(at::randn({2, 3}));
    layer->train();
    output.backward(gradient.narrow(0, 3L * rank, 3));
    EXPECT_TRUE(close(input.grad(), expected.grad_input.narrow(0, 3L * rank, 3)));
    EXPECT_TRUE(close(layer->running_mean, expected.running_mean));
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 1);
  });
}

}  // namespace
