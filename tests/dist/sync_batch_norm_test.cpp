#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/dist/collectives.h>
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

#include "dist/device.h"
#include "dist/tensors.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
namespace test = syncbn::test;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::device;
using syncbn::test::exchanges;
using syncbn::test::on_device;
using syncbn::test::run_on_device;
using syncbn::test::run_ranks;
using testing::HasSubstr;
using testing::ThrowsMessage;
using SyncBatchNormTest = syncbn::test::DeviceTest;

/// The results of one process on the whole batch, in float64 on the CPU.
struct Reference {
  at::Tensor output, grad_input, grad_weight, grad_bias, running_mean, running_var;
};

Reference whole_batch(const at::Tensor& input, const at::Tensor& grad_output,
                      const at::Tensor& weight, const at::Tensor& bias, double momentum,
                      double eps) {
  const at::Tensor x = input.detach().to(at::kCPU, at::kDouble).requires_grad_();
  const at::Tensor w = weight.detach().to(at::kCPU, at::kDouble).requires_grad_();
  const at::Tensor b = bias.detach().to(at::kCPU, at::kDouble).requires_grad_();
  Reference result;
  result.running_mean = at::zeros({x.size(1)}, at::kDouble);
  result.running_var = at::ones({x.size(1)}, at::kDouble);
  result.output =
      at::batch_norm(x, w, b, result.running_mean, result.running_var, true, momentum, eps, false);
  result.output.backward(grad_output.to(at::kCPU, at::kDouble));
  result.grad_input = x.grad();
  result.grad_weight = w.grad();
  result.grad_bias = b.grad();
  return result;
}

/// The error of a float32 result of a few values is below this. On GPUs, all arithmetic for float32
/// is in float32.
double float_atol() {
  return device().is_cuda() ? 1e-5 : 1e-6;
}

/// One layer on shards of the batch, compared with the whole batch.
struct WholeBatchCase {
  std::vector<int64_t> shares;              ///< number of samples of each rank
  std::vector<int64_t> sample = {5, 4, 3};  ///< [C, ...]
  at::ScalarType type = at::kFloat;
  bool channels_last = false;
  double mean = 0.5;
  double stddev = 2.0;
  double eps = 1e-5;
  double rtol = 1e-5;
  double atol = 2e-6;
};

void expect_as_whole_batch(const WholeBatchCase& c, int rank) {
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
  layer->to(device(), c.type == at::kDouble ? at::kDouble : at::kFloat);
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
  const at::Tensor input = share(batch).to(device()).requires_grad_();
  const at::Tensor output = layer->forward(input);
  output.backward(share(grad_batch).to(device()));
  // GPUs have the mean and the deviation in the input's type, the CPU in float64: a small deviation
  // and the weight amplify their rounding.
  const double atol = (device().is_cuda() ? 5 : 1) * c.atol;

  EXPECT_EQ(output.scalar_type(), c.type);
  if (c.channels_last && c.shares[at_rank] > 0) {
    EXPECT_EQ(output.suggest_memory_format(), input.suggest_memory_format());
  }
  EXPECT_TRUE(close(output, share(expected.output), c.rtol, atol));
  // A gradient grows with 1 / stddev, and so do the terms that cancel in it.
  const double scale = std::max(1.0, expected.grad_input.abs().max().item<double>());
  EXPECT_TRUE(close(input.grad(), share(expected.grad_input), c.rtol, atol * scale));
  // The parameters' gradients are local sums; DDP would average them.
  at::Tensor grad_weight = layer->weight.grad().to(at::kDouble);
  at::Tensor grad_bias = layer->bias.grad().to(at::kDouble);
  dist::all_reduce(grad_weight);
  dist::all_reduce(grad_bias);
  EXPECT_TRUE(close(grad_weight, expected.grad_weight, 10 * c.rtol, 100 * atol));
  EXPECT_TRUE(close(grad_bias, expected.grad_bias, 10 * c.rtol, 100 * atol));
  EXPECT_TRUE(close(layer->running_mean, expected.running_mean, 1e-6, 1e-7));
  EXPECT_TRUE(close(layer->running_var, expected.running_var, 1e-6, 1e-7));
  EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 1);
}

void expect_as_whole_batch(const WholeBatchCase& c) {
  run_on_device(static_cast<int>(c.shares.size()),
                [&c](int rank) { expect_as_whole_batch(c, rank); });
}

TEST_F(SyncBatchNormTest, EqualsBatchNormNdOnTheWholeBatch) {
  expect_as_whole_batch({.shares = {6, 6}, .sample = {7}});
  expect_as_whole_batch({.shares = {4, 4}, .sample = {7, 9}});
  for (const bool channels_last : {false, true}) {
    SCOPED_TRACE(channels_last);
    expect_as_whole_batch(
        {.shares = {4, 4}, .sample = {6, 33, 40}, .channels_last = channels_last});
    expect_as_whole_batch(
        {.shares = {3, 3}, .sample = {5, 4, 6, 7}, .channels_last = channels_last});
  }
}

// Rows of several cache lines and a part of one; whole blocks of rows and a partial one.
TEST_F(SyncBatchNormTest, EqualsBatchNormOnTheWholeBatchForWideRows) {
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

// Above 1 MiB, results bypass the cache if planes and rows are whole vectors, else they do not.
TEST(SyncBatchNormOnCpuTest, EqualsBatchNormOnTheWholeBatchWhereResultsGoPastTheCache) {
  for (const std::vector<int64_t>& sample :
       {std::vector<int64_t>{8, 160, 208}, std::vector<int64_t>{3, 613, 601}}) {
    for (const bool channels_last : {false, true}) {
      WholeBatchCase c{.shares = {1, 1},
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

// Messages that are gathered at once in forward and backward, in forward only, and in neither. The
// limit is 256 KiB for all ranks together, with 2 C + 4 numbers in forward and 2 C + 6 in backward.
TEST(SyncBatchNormOnCpuTest, EqualsBatchNormOnTheWholeBatchForMessagesOfAnySize) {
  for (const int64_t channels : {8189, 8190, 20000}) {
    expect_as_whole_batch({.shares = {3, 2}, .sample = {channels}, .rtol = 1e-4, .atol = 1e-5});
  }
  expect_as_whole_batch({.shares = {1, 2, 0, 2}, .sample = {5000}, .rtol = 1e-4, .atol = 1e-5});
}

TEST_F(SyncBatchNormTest, TakesHalfPrecisionInputs) {
  expect_as_whole_batch(
      {.shares = {4, 4}, .sample = {5, 8, 8}, .type = at::kHalf, .rtol = 2e-3, .atol = 2e-3});
  expect_as_whole_batch(
      {.shares = {4, 4}, .sample = {5, 8, 8}, .type = at::kBFloat16, .rtol = 2e-2, .atol = 2e-2});
}

TEST_F(SyncBatchNormTest, EqualsBatchNormOnTheWholeBatchInEveryTypeDimensionAndFormat) {
  struct Type {
    at::ScalarType type;
    double bound;
  };
  run_on_device(3, [](int rank) {
    for (const Type& t : {Type{at::kFloat, 2e-6}, Type{at::kDouble, 1e-13}, Type{at::kHalf, 2e-3},
                          Type{at::kBFloat16, 2e-2}}) {
      for (const std::vector<int64_t>& sample :
           {std::vector<int64_t>{7}, std::vector<int64_t>{5, 6}, std::vector<int64_t>{5, 4, 3},
            std::vector<int64_t>{5, 2, 3, 4}}) {
        for (const bool channels_last : {false, true}) {
          if (channels_last && sample.size() < 3) continue;
          SCOPED_TRACE(testing::Message() << t.type << " in " << sample.size() + 1 << " dimensions"
                                          << (channels_last ? ", channels last" : ""));
          expect_as_whole_batch({.shares = {4, 0, 3},
                                 .sample = sample,
                                 .type = t.type,
                                 .channels_last = channels_last,
                                 .rtol = 5 * t.bound,
                                 .atol = t.bound},
                                rank);
        }
      }
    }
  });
}

TEST_F(SyncBatchNormTest, IsExactWhenARankHasNoSamples) {
  expect_as_whole_batch({.shares = {0, 5}, .sample = {4}});
}

TEST_F(SyncBatchNormTest, WorksWithOneSampleARank) {
  expect_as_whole_batch({.shares = {1, 1, 1}, .sample = {6}});
}

TEST_F(SyncBatchNormTest, KeepsPrecisionWhenTheMeanIsLargeAgainstTheDeviation) {
  // On GPUs the mean is float32, and has an error of 6e-4 deviations.
  const double bound = device().is_cuda() ? 2e-3 : 2e-5;
  expect_as_whole_batch({.shares = {4, 4},
                         .sample = {3, 64, 64},
                         .mean = 1e3,
                         .stddev = 0.1,
                         .rtol = bound,
                         .atol = bound});
}

TEST_F(SyncBatchNormTest, KeepsPrecisionForTinyVariance) {
  expect_as_whole_batch({.shares = {4, 4},
                         .sample = {3, 16, 16},
                         .mean = 0,
                         .stddev = 1e-6,
                         .eps = 1e-14,
                         .rtol = 1e-4,
                         .atol = 1e-5});
}

TEST_F(SyncBatchNormTest, ExchangesOnceForwardAndOnceBackward) {
  run_on_device(2, [](int) {
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    layer->forward(test::randn({4, 3, 2, 2}));  // creates the group
    const uint64_t before = exchanges();
    const at::Tensor output = layer->forward(test::randn({4, 3, 2, 2}).requires_grad_());
    EXPECT_EQ(exchanges(), before + 1);
    output.sum().backward();
    EXPECT_EQ(exchanges(), before + 2);
  });
}

TEST_F(SyncBatchNormTest, EvaluationUsesRunningStatisticsAndExchangesNothing) {
  run_on_device(2, [](int rank) {
    at::manual_seed(rank);
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    layer->forward(test::randn({4, 3, 2, 2}));
    layer->eval();
    const uint64_t before = exchanges();
    const at::Tensor input = test::randn({4, 3, 2, 2});
    const at::Tensor expected =
        at::batch_norm(input, layer->weight, layer->bias, layer->running_mean, layer->running_var,
                       false, 0.0, 1e-5, at::globalContext().userEnabledCuDNN());
    EXPECT_TRUE(layer->forward(input).equal(expected));
    EXPECT_EQ(exchanges(), before);
  });
}

// As torch.nn.SyncBatchNorm does.
TEST_F(SyncBatchNormTest, EvaluationWithoutRunningStatisticsUsesTheRanksOwnAndExchangesNothing) {
  run_on_device(2, [](int rank) {
    at::manual_seed(rank);
    SyncBatchNorm layer =
        on_device(SyncBatchNorm(SyncBatchNormOptions(3).track_running_stats(false)));
    {
      const at::NoGradGuard no_grad;
      layer->weight.copy_(at::randn({3}) + 2);
    }
    layer->forward(test::randn({4, 3, 2, 2}));  // creates the group
    layer->eval();
    const uint64_t before = exchanges();
    // Ranks may evaluate different numbers of times.
    for (int i = 0; i <= rank; ++i) {
      const at::Tensor input = (test::randn({4 + rank, 3, 2, 2}) + 3 * rank).requires_grad_();
      const at::Tensor gradient = test::randn({4 + rank, 3, 2, 2});
      const Reference expected =
          whole_batch(input, gradient, layer->weight, layer->bias, 0.1, 1e-5);
      layer->zero_grad();
      const at::Tensor output = layer(input);
      output.backward(gradient);
      EXPECT_TRUE(close(output, expected.output, 1e-5, 1e-5));
      EXPECT_TRUE(close(input.grad(), expected.grad_input, 1e-5, 1e-5));
      EXPECT_TRUE(close(layer->weight.grad(), expected.grad_weight, 1e-5, 1e-5));
      EXPECT_TRUE(close(layer->bias.grad(), expected.grad_bias, 1e-5, 1e-5));
    }
    EXPECT_EQ(exchanges(), before);
    EXPECT_EQ(layer->named_buffers().size(), 0u);
  });
}

TEST_F(SyncBatchNormTest, WithoutMomentumAveragesAllBatches) {
  run_on_device(2, [](int rank) {
    at::manual_seed(3);
    SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(2).momentum(std::nullopt)));
    at::Tensor mean = test::zeros({2});
    for (int step = 0; step < 4; ++step) {
      const at::Tensor batch = test::randn({6, 2});
      mean += batch.mean(0) / 4;
      layer->forward(batch.narrow(0, int64_t{3} * rank, 3));
    }
    EXPECT_TRUE(close(layer->running_mean, mean));
  });
}

TEST_F(SyncBatchNormTest, RunningStatisticsMayBeOfAnyTypeAndLieApart) {
  run_on_device(2, [](int rank) {
    at::manual_seed(3);
    const at::Tensor batch = test::randn({6, 5}) * 3 + 1;
    const auto after_a_step = [&](at::ScalarType type, bool apart) {
      SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(5).momentum(0.25)));
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

// Module::to(dtype) converts the counter to a floating-point number.
TEST_F(SyncBatchNormTest, CountsBatchesAfterTheLayerWasMovedToAnotherType) {
  run_ranks(1, [](int) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf}) {
      SyncBatchNorm layer =
          on_device(SyncBatchNorm(SyncBatchNormOptions(2).momentum(std::nullopt)));
      layer->to(type);
      at::Tensor mean = test::zeros({2}, at::kDouble);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor batch = test::randn({6, 2}).to(type);
        mean += batch.to(at::kDouble).mean(0) / 3;
        layer->forward(batch);
      }
      EXPECT_EQ(layer->num_batches_tracked.item<double>(), 3);
      EXPECT_TRUE(close(layer->running_mean, mean, 1e-2, 1e-3)) << type;
    }
  });
}

// On the CPU, no ATen operator writes them.
TEST_F(SyncBatchNormTest, AutogradSeesThatRunningStatisticsHaveChanged) {
  run_ranks(1, [](int) {
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    const at::Tensor input = test::randn({4, 3});
    for (const at::Tensor& buffer : {layer->running_mean, layer->running_var}) {
      const at::Tensor x = test::randn({3}).requires_grad_();
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

TEST_F(SyncBatchNormTest, RunningStatisticsFollowTheWholeBatchOverManySteps) {
  run_on_device(2, [](int rank) {
    at::manual_seed(5);
    SyncBatchNorm layer = on_device(SyncBatchNorm(SyncBatchNormOptions(3).momentum(0.99)));
    at::Tensor mean = at::zeros({3});
    at::Tensor variance = at::ones({3});
    for (int step = 0; step < 100; ++step) {
      const at::Tensor batch = at::randn({5, 3, 4}) * (1 + step % 7) + step % 3;
      at::batch_norm(batch, {}, {}, mean, variance, true, 0.99, 1e-5, false);
      const at::Tensor own = rank == 0 ? batch.narrow(0, 0, 2) : batch.narrow(0, 2, 3);
      layer->forward(own.to(device()));
    }
    EXPECT_TRUE(close(layer->running_mean, mean));
    EXPECT_TRUE(close(layer->running_var, variance));
  });
}

TEST_F(SyncBatchNormTest, WorksWithoutAffineAndWithoutRunningStatistics) {
  run_on_device(2, [](int rank) {
    at::manual_seed(1);
    SyncBatchNorm layer =
        on_device(SyncBatchNorm(SyncBatchNormOptions(3).affine(false).track_running_stats(false)));
    const at::Tensor batch = test::randn({6, 3});
    const at::Tensor expected = at::batch_norm(batch, {}, {}, {}, {}, true, 0.1, 1e-5, false);
    EXPECT_TRUE(close(layer->forward(batch.narrow(0, int64_t{3} * rank, 3)),
                      expected.narrow(0, int64_t{3} * rank, 3), 1e-5, float_atol()));
    EXPECT_EQ(layer->named_parameters().size(), 0u);
    EXPECT_EQ(layer->named_buffers().size(), 0u);
  });
}

TEST_F(SyncBatchNormTest, GradientsOfSeveralForwardsAccumulate) {
  run_on_device(2, [](int rank) {
    at::manual_seed(4);
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    at::Tensor grad_weight = at::zeros({3}, at::kDouble);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor batch = test::randn({6, 3});
      const at::Tensor gradient = test::randn({6, 3});
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

TEST_F(SyncBatchNormTest, ForwardsBeforeBackwardsKeepTheirOwnStatistics) {
  run_on_device(2, [](int rank) {
    at::manual_seed(4);
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    std::vector<at::Tensor> inputs, outputs, gradients;
    std::vector<Reference> expected;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor batch = test::randn({6, 3}) + i;
      gradients.push_back(test::randn({6, 3}));
      expected.push_back(
          whole_batch(batch, gradients.back(), layer->weight, layer->bias, 0.1, 1e-5));
      inputs.push_back(batch.narrow(0, 3L * rank, 3).clone().requires_grad_());
      outputs.push_back(layer(inputs.back()));
    }
    for (size_t i = 3; i-- > 0;) {
      outputs[i].backward(gradients[i].narrow(0, 3L * rank, 3));
      EXPECT_TRUE(close(inputs[i].grad(), expected[i].grad_input.narrow(0, 3L * rank, 3), 1e-5,
                        float_atol()));
    }
  });
}

TEST_F(SyncBatchNormTest, WorksUnderAutocast) {
  run_on_device(2, [](int rank) {
    at::manual_seed(6);
    const at::Tensor batch = test::randn({8, 5});
    const at::Tensor filter = test::randn({4, 5});
    SyncBatchNorm layer = on_device(SyncBatchNorm(4));
    SyncBatchNorm exact = on_device(SyncBatchNorm(4));
    const at::Tensor own = batch.narrow(0, 4L * rank, 4);
    const at::Tensor expected = exact(at::linear(own, filter));
    at::autocast::set_autocast_enabled(device().type(), true);
    const at::Tensor input = at::linear(own, filter).requires_grad_();
    const at::Tensor output = layer(input);
    at::autocast::set_autocast_enabled(device().type(), false);
    const at::ScalarType narrow = at::autocast::get_autocast_dtype(device().type());
    EXPECT_EQ(narrow, device().is_cuda() ? at::kHalf : at::kBFloat16);
    EXPECT_EQ(input.scalar_type(), narrow);
    EXPECT_EQ(output.scalar_type(), narrow);
    EXPECT_EQ(layer->running_mean.scalar_type(), at::kFloat);
    EXPECT_TRUE(close(output, expected, 2e-2, 3e-2));
    EXPECT_TRUE(close(layer->running_var, exact->running_var, 2e-2, 2e-2));
    output.sum().backward();
    EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
  });
}

TEST_F(SyncBatchNormTest, EvaluationBetweenForwardAndBackwardDisturbsNothing) {
  run_on_device(2, [](int rank) {
    at::manual_seed(4);
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    const at::Tensor batch = test::randn({6, 3});
    const at::Tensor gradient = test::randn({6, 3});
    const Reference expected = whole_batch(batch, gradient, layer->weight, layer->bias, 0.1, 1e-5);
    const at::Tensor input = batch.narrow(0, 3L * rank, 3).clone().requires_grad_();
    const at::Tensor output = layer(input);
    layer->eval();
    // Ranks may evaluate different numbers of times.
    for (int i = 0; i <= rank; ++i) layer(test::randn({2, 3}));
    layer->train();
    output.backward(gradient.narrow(0, 3L * rank, 3));
    EXPECT_TRUE(
        close(input.grad(), expected.grad_input.narrow(0, 3L * rank, 3), 1e-5, float_atol()));
    EXPECT_TRUE(close(layer->running_mean, expected.running_mean));
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 1);
  });
}

}  // namespace
