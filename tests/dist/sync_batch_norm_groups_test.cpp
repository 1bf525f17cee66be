// Which ranks share statistics, and what a SyncBatchNorm layer refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <cstdlib>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "dist/tensors.h"
#include "groups/world.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::message_of;
using syncbn::test::run_ranks;
using ::testing::HasSubstr;

TEST(SyncBatchNormTest, SharesStatisticsWithinItsProcessGroupOnly) {
  run_ranks(4, [](int rank) {
    dist::init_process_group();
    const auto group = dist::new_subgroups(2);
    at::manual_seed(1);
    SyncBatchNorm layer(SyncBatchNormOptions(3).process_group(group));
    const at::Tensor batch = at::randn({8, 3});
    layer->forward(batch.narrow(0, int64_t{2} * rank, 2));
    const at::Tensor own = batch.narrow(0, rank < 2 ? 0 : 4, 4);
    EXPECT_TRUE(close(layer->running_mean, own.mean(0) * 0.1));
  });
}

TEST(SyncBatchNormTest, EqualsBatchNormInAWorldOfOne) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    at::manual_seed(1);
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    const at::Tensor batch = at::randn({6, 3, 4});
    const at::Tensor expected =
        at::batch_norm(batch, layer->weight, layer->bias, {}, {}, true, 0.1, 1e-5, false);
    EXPECT_TRUE(close(layer->forward(batch), expected));
    EXPECT_THAT(message_of<UserError>([&] {
                  layer->forward(at::randn({1, 3}));
                }),
                HasSubstr("one value per channel"));
  });
}

TEST(SyncBatchNormTest, AForgottenInitProcessGroupIsAnError) {
  run_ranks(1, [](int) {
    ::setenv("WORLD_SIZE", "2", 1);
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    EXPECT_THAT(message_of<UserError>([&] {
                  layer->forward(at::randn({4, 3}));
                }),
                HasSubstr("init_process_group"));
  });
}

TEST(SyncBatchNormTest, OneValuePerChannelOverAllRanksIsAnErrorOnEveryRank) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    EXPECT_THAT(message_of<UserError>([&] {
                  layer->forward(at::randn({rank == 0 ? 1 : 0, 3}));
                }),
                HasSubstr("one value per channel"));
    EXPECT_TRUE(layer->running_mean.equal(at::zeros({3})));
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 0);
  });
}

TEST(SyncBatchNormTest, AllRanksEmptyLeavesTheRunningStatisticsAlone) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    const at::Tensor output = layer->forward(at::empty({0, 3, 2}).requires_grad_());
    EXPECT_EQ(output.numel(), 0);
    output.sum().backward();
    EXPECT_TRUE(layer->weight.grad().equal(at::zeros({3})));
    EXPECT_TRUE(layer->running_mean.equal(at::zeros({3})));
    EXPECT_TRUE(layer->running_var.equal(at::ones({3})));
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 0);
  });
}

TEST(SyncBatchNormTest, WrongInputsAreNamed) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    SyncBatchNorm layer(SyncBatchNormOptions(3));
    const auto message = [&](const at::Tensor& input, const at::Tensor& residual = {}) {
      return message_of<UserError>([&] { layer->forward(input, residual); });
    };
    EXPECT_THAT(message(at::randn({4, 3}), at::randn({4, 1})), HasSubstr("what is added"));
    EXPECT_THAT(message(at::randn({4})), HasSubstr("2 to 5 dimensions"));
    EXPECT_THAT(message(at::randn({4, 2})), HasSubstr("3 channels"));
    EXPECT_THAT(message(at::ones({4, 3}, at::kLong)), HasSubstr("floating-point"));
  });
}

TEST(SyncBatchNormTest, GroupSizeSharesStatisticsBetweenNeighbours) {
  run_ranks(8, [](int rank) {
    dist::init_process_group();
    at::manual_seed(1);
    const at::Tensor batch = at::randn({16, 3});
    for (const int size : {1, 2, 4, 8}) {
      SyncBatchNorm layer(SyncBatchNormOptions(3).group_size(size));
      layer(batch.narrow(0, int64_t{2} * rank, 2));
      const int64_t first = rank / size * size;
      EXPECT_TRUE(
          close(layer->running_mean, batch.narrow(0, 2 * first, int64_t{2} * size).mean(0) * 0.1))
          << "groups of " << size;
    }
    // One group for all layers of one size.
    EXPECT_EQ(dist::detail::statistics_subgroup(2), dist::detail::statistics_subgroup(2));
  });
}

TEST(SyncBatchNormTest, AGroupSizeThatDoesNotFitIsAnError) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    const auto message = [](const SyncBatchNormOptions& options) {
      SyncBatchNorm layer(options);
      return message_of<UserError>([&] { layer(at::randn({4, 3})); });
    };
    EXPECT_THAT(message(SyncBatchNormOptions(3).group_size(3)), HasSubstr("group_size is 3"));
    EXPECT_THAT(message(SyncBatchNormOptions(3).group_size(-1)), HasSubstr("group_size is -1"));
    EXPECT_THAT(message(SyncBatchNormOptions(3).group_size(2).process_group(dist::default_group())),
                HasSubstr("both process_group and group_size"));
    dist::barrier();
  });
}

TEST(SyncBatchNormTest, AGroupOfSomeRanksLeavesTheOthersAlone) {
  run_ranks(3, [](int rank) {
    dist::init_process_group();
    const auto group = dist::new_group({0, 2});
    at::manual_seed(1);
    const at::Tensor batch = at::randn({6, 3});
    if (rank != 1) {
      SyncBatchNorm layer(SyncBatchNormOptions(3).process_group(group));
      layer(batch.narrow(0, int64_t{2} * rank, 2));
      const at::Tensor both = at::cat({batch.narrow(0, 0, 2), batch.narrow(0, 4, 2)});
      EXPECT_TRUE(close(layer->running_mean, both.mean(0) * 0.1));
    }
    dist::barrier();
  });
}

}  // namespace
