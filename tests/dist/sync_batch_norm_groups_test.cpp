// Which ranks share statistics, and what a SyncBatchNorm layer refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>

#include "dist/device.h"
#include "dist/tensors.h"
#include "groups/world.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace test = syncbn::test;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::device;
using syncbn::test::message_of;
using syncbn::test::on_device;
using syncbn::test::run_on_device;
using syncbn::test::run_ranks;
using ::testing::HasSubstr;
using SyncBatchNormTest = syncbn::test::DeviceTest;

/// A batch and the gradient of its output: the same on all ranks.
struct Batch {
  explicit Batch(const std::vector<int64_t>& sizes, at::ScalarType type = at::kFloat,
                 at::MemoryFormat format = at::MemoryFormat::Contiguous)
      : input(random(sizes, type, format)), gradient(random(sizes, type, format)) {}

  static at::Tensor random(const std::vector<int64_t>& sizes, at::ScalarType type,
                           at::MemoryFormat format) {
    return test::randn(sizes, at::kDouble).mul(2).add(1).to(type).contiguous(format);
  }

  at::Tensor input, gradient;
};

/// Compares a step of a new layer, on this rank's part of the samples of a group, with BatchNorm on
/// all of them, in float64.
/// @param begin the first of this rank's `samples`
void expect_as_batch_norm(const SyncBatchNormOptions& options, const Batch& whole, int64_t begin,
                          int64_t samples, const dist::ProcessGroupPtr& group) {
  const int64_t channels = options.num_features();
  const auto precise = [](const at::Tensor& tensor) {
    return tensor.detach().to(at::kCPU, at::kDouble);
  };
  const at::ScalarType type = whole.input.scalar_type();
  const at::Tensor x = precise(whole.input).clone().requires_grad_();
  const at::Tensor weight = at::arange(1, channels + 1, at::kDouble).requires_grad_();
  const at::Tensor bias = at::ones({channels}, at::kDouble).requires_grad_();
  const at::Tensor running_mean = at::zeros({channels}, at::kDouble);
  const at::Tensor running_var = at::ones({channels}, at::kDouble);
  const at::Tensor y =
      at::batch_norm(x, weight, bias, running_mean, running_var, true, 0.1, 1e-5, false);
  y.backward(precise(whole.gradient));

  SyncBatchNorm layer(options);
  layer->to(device(), type == at::kDouble ? at::kDouble : at::kFloat);
  {
    const at::NoGradGuard no_grad;
    layer->weight.copy_(weight);
    layer->bias.copy_(bias);
  }
  const auto own = [&](const at::Tensor& all) { return all.narrow(0, begin, samples); };
  const at::Tensor input = own(whole.input).detach().clone().requires_grad_();
  const at::Tensor output = layer(input);
  output.backward(own(whole.gradient));
  const auto sum = [&](const at::Tensor& part) {
    at::Tensor all = precise(part).clone();
    dist::all_reduce(all, c10d::ReduceOp::SUM, group);
    return all;
  };
  EXPECT_EQ(output.scalar_type(), type);
  EXPECT_EQ(input.grad().scalar_type(), type);
  // On GPUs the mean is in the input's type or float32, and the weight amplifies its rounding.
  const double bound = type == at::kDouble ? 1e-12 : type == at::kFloat ? 1e-5 : 2e-3;
  const double atol = device().is_cuda() ? bound : bound / 10;
  const double scale = std::max(1.0, x.grad().abs().max().item<double>());
  EXPECT_TRUE(close(output, own(y), bound, atol));
  EXPECT_TRUE(close(input.grad(), own(x.grad()), bound, atol * scale));
  EXPECT_TRUE(close(sum(layer->weight.grad()), weight.grad(), bound, 10 * atol));
  EXPECT_TRUE(close(sum(layer->bias.grad()), bias.grad(), bound, 10 * atol));
  const double of_statistics = std::min(bound, 1e-5);
  EXPECT_TRUE(close(layer->running_mean, running_mean, of_statistics, of_statistics / 10));
  EXPECT_TRUE(close(layer->running_var, running_var, of_statistics, of_statistics / 10));
}

TEST_F(SyncBatchNormTest, SharesStatisticsWithinItsProcessGroupOnly) {
  run_on_device(4, [](int rank) {
    const auto group = dist::new_subgroups(2);
    at::manual_seed(1);
    const Batch batches[] = {Batch({5, 3, 2}), Batch({5, 3, 2})};
    // The ranks of a group have three and two samples.
    expect_as_batch_norm(SyncBatchNormOptions(3).process_group(group), batches[rank / 2],
                         rank % 2 == 0 ? 0 : 3, rank % 2 == 0 ? 3 : 2, group);
  });
}

TEST_F(SyncBatchNormTest, EqualsBatchNormInAWorldOfOne) {
  run_on_device(1, [](int) {
    at::manual_seed(1);
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf}) {
      for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
        SCOPED_TRACE(::testing::Message() << type << ", " << format);
        expect_as_batch_norm(3, Batch({6, 3, 4, 5}, type, format), 0, 6, {});
      }
      expect_as_batch_norm(3, Batch({6, 3, 4}, type), 0, 6, {});
    }
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    EXPECT_THAT(message_of<UserError>([&] {
                  layer->forward(test::randn({1, 3}));
                }),
                HasSubstr("one value per channel"));
  });
}

TEST(SyncBatchNormOnCpuTest, AForgottenInitProcessGroupIsAnError) {
  run_ranks(1, [](int) {
    ::setenv("WORLD_SIZE", "2", 1);
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    EXPECT_THAT(message_of<UserError>([&] {
                  layer->forward(at::randn({4, 3}));
                }),
                HasSubstr("init_process_group"));
  });
}

TEST_F(SyncBatchNormTest, OneValuePerChannelOverAllRanksIsAnErrorOnEveryRank) {
  run_on_device(2, [](int rank) {
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    EXPECT_THAT(message_of<UserError>([&] {
                  layer->forward(test::randn({rank == 0 ? 1 : 0, 3}));
                }),
                HasSubstr("one value per channel"));
    EXPECT_TRUE(layer->running_mean.equal(test::zeros({3})));
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 0);
  });
}

TEST_F(SyncBatchNormTest, WrongInputsAreNamed) {
  run_on_device(2, [](int) {
    SyncBatchNorm layer = on_device(SyncBatchNorm(3));
    const auto message = [&](const at::Tensor& input, const at::Tensor& residual = {}) {
      return message_of<UserError>([&] { layer->forward(input, residual); });
    };
    EXPECT_THAT(message(test::randn({4, 3}), test::randn({4, 1})), HasSubstr("the residual must"));
    EXPECT_THAT(message(test::randn({4})), HasSubstr("2 to 5 dimensions"));
    EXPECT_THAT(message(test::randn({4, 2})), HasSubstr("3 channels"));
    EXPECT_THAT(message(test::ones({4, 3}, at::kLong)), HasSubstr("floating-point"));
  });
}

TEST_F(SyncBatchNormTest, GroupSizeSharesStatisticsBetweenNeighbours) {
  run_on_device(8, [](int rank) {
    for (const int size : {1, 2, 4, 8}) {
      SCOPED_TRACE(::testing::Message() << "groups of " << size);
      // Each group has its own batch.
      at::manual_seed(static_cast<uint64_t>(10 + rank / size));
      expect_as_batch_norm(SyncBatchNormOptions(3).group_size(size), Batch({2L * size, 3, 2}),
                           2L * (rank % size), 2, dist::new_subgroups(size));
    }
    // All layers with this group size share one group.
    EXPECT_EQ(dist::detail::statistics_subgroup(2), dist::detail::statistics_subgroup(2));
  });
}

TEST_F(SyncBatchNormTest, OptionsThatMakeNoSenseAreNamed) {
  const auto message = [](const SyncBatchNormOptions& options) {
    return message_of<UserError>([&] { SyncBatchNorm layer(options); });
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(message(SyncBatchNormOptions(0)), HasSubstr("num_features must be positive, got 0"));
  for (const double eps : {-1e-5, nan, infinity}) {
    EXPECT_THAT(message(SyncBatchNormOptions(3).eps(eps)), HasSubstr("eps must be"));
  }
  for (const double momentum : {-0.5, 2.0, nan}) {
    EXPECT_THAT(message(SyncBatchNormOptions(3).momentum(momentum)),
                HasSubstr("momentum must be from 0 to 1"));
  }
  using std::chrono::milliseconds;
  for (const auto timeout : {milliseconds(0), milliseconds(-5)}) {
    EXPECT_THAT(message(SyncBatchNormOptions(3).sync_timeout(timeout)),
                HasSubstr("sync_timeout must be above zero"));
    EXPECT_THAT(message_of<UserError>([&] {
                  torch::nn::BatchNorm1d net(3);
                  dist::convert_sync_batchnorm(*net, {}, timeout);
                }),
                HasSubstr("sync_timeout must be above zero"));
  }
  EXPECT_GT(SyncBatchNorm(SyncBatchNormOptions(3).sync_timeout(milliseconds::max()))
                ->options.sync_timeout()
                .value(),
            milliseconds(0));
}

TEST_F(SyncBatchNormTest, AGroupSizeThatDoesNotFitIsAnError) {
  run_on_device(2, [](int) {
    const auto message = [](const SyncBatchNormOptions& options) {
      SyncBatchNorm layer = on_device(SyncBatchNorm(options));
      return message_of<UserError>([&] { layer(test::randn({4, 3})); });
    };
    EXPECT_THAT(message(SyncBatchNormOptions(3).group_size(3)), HasSubstr("group_size is 3"));
    EXPECT_THAT(message(SyncBatchNormOptions(3).group_size(-1)), HasSubstr("group_size is -1"));
    EXPECT_THAT(message(SyncBatchNormOptions(3).group_size(2).process_group(dist::default_group())),
                HasSubstr("both process_group and group_size"));
    dist::barrier();
  });
}

TEST_F(SyncBatchNormTest, AGroupOfSomeRanksLeavesTheOthersAlone) {
  run_on_device(3, [](int rank) {
    const auto group = dist::new_group({0, 2});
    at::manual_seed(1);
    const Batch both({4, 3, 2});  // rank 0 has the first half, rank 2 the second
    if (rank != 1) {
      expect_as_batch_norm(SyncBatchNormOptions(3).process_group(group), both, rank, 2, group);
    }
    dist::barrier();
  });
}

}  // namespace
