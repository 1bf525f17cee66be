// SyncBatchNorm on several hosts, whose leaders merge the rows of their ranks in a tree.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <unistd.h>

#include <chrono>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include "collectives/gather_rows.h"
#include "dist/group.h"
#include "dist/hosts.h"
#include "dist/tensors.h"
#include "groups/world.h"
#include "support/skip.h"
#include "support/thrown.h"

namespace syncbn::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using base::UnavailableError;
using base::UserError;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;

class BatchNormHostsTest : public ::testing::Test {
 protected:
  void SetUp() override { SYNCBN_SKIP_UNLESS(may_make_namespaces(), "namespaces"); }
};

constexpr double kPatience = 150;  // seconds: many ranks share few cores

/// Expects the same bits on every rank of the group.
void expect_equal_on_all_ranks(const Tensor& tensor, const dist::ProcessGroupPtr& group) {
  for (const Tensor& theirs : dist::all_gather(tensor, group)) EXPECT_TRUE(theirs.equal(tensor));
}

/// Compares a step of SyncBatchNorm with BatchNorm on the samples of all ranks of the group. A rank
/// has no, one or two samples.
void expect_as_whole_batch(int64_t channels, const dist::ProcessGroupPtr& group) {
  const int rank = dist::rank(group);
  const auto samples_before = [](int64_t end) {
    int64_t samples = 0;
    for (int64_t one = 0; one < end; ++one) samples += (one + 1) % 3;
    return samples;
  };
  at::manual_seed(7);
  const Tensor all =
      at::randn({samples_before(group->getSize()), channels, 2}, at::kDouble).mul_(3).add_(100);
  const Tensor gradient = at::randn(all.sizes(), at::kDouble);
  const auto own = [&](const Tensor& whole) {
    return whole.narrow(0, samples_before(rank), (rank + 1) % 3);
  };
  const Tensor whole = all.clone().requires_grad_();
  const Tensor running_mean = at::zeros({channels}, at::kDouble);
  const Tensor running_var = at::ones({channels}, at::kDouble);
  const Tensor expected =
      at::batch_norm(whole, {}, {}, running_mean, running_var, /*training=*/true, 0.1, 1e-5, false);
  expected.backward(gradient);

  SyncBatchNorm layer(SyncBatchNormOptions(channels).process_group(group));
  layer->to(at::kDouble);
  const Tensor input = own(all).clone().requires_grad_();
  const dist::detail::Backend& backend = *dist::detail::backend_of(group);
  const uint64_t before = backend.sequence();
  const Tensor output = layer(input);
  output.backward(own(gradient));
  if (backend.shares_memory()) {
    EXPECT_EQ(backend.sequence() - before, 2U);
  }
  EXPECT_TRUE(close(output, own(expected), 1e-11, 1e-11));
  EXPECT_TRUE(close(input.grad(), own(whole.grad()), 1e-11, 1e-11));
  EXPECT_TRUE(close(layer->running_mean, running_mean, 1e-12, 0));
  EXPECT_TRUE(close(layer->running_var, running_var, 1e-12, 0));
  expect_equal_on_all_ranks(layer->running_mean, group);
  expect_equal_on_all_ranks(layer->running_var, group);
}

/// In a group of all ranks, and in one of every second rank, in descending order. With few
/// channels, and with more than fit into one step of shared memory.
void expect_groups_as_whole_batch() {
  std::vector<int> odd;
  for (int rank = 1; rank < dist::world_size(); rank += 2) odd.insert(odd.begin(), rank);
  const auto some = dist::new_group(odd);
  const auto all = dist::detail::statistics_group({});
  EXPECT_EQ(dist::detail::backend_of(all)->shares_memory(), dist::world_size() > 2);
  for (const int64_t channels : {5, 20'000}) {
    SCOPED_TRACE(channels);
    const Tensor row = at::zeros({1, 2 * channels + 4}, at::kDouble);
    const bool is_wide = channels == 20'000;
    if (is_wide || dist::world_size() > 16) {
      EXPECT_TRUE(dist::detail::merges_in_tree(row, all));
    }
    expect_as_whole_batch(channels, all);
    if (some) expect_as_whole_batch(channels, some);
  }
}

TEST_F(BatchNormHostsTest, EqualsBatchNormOnTheWholeBatch) {
  for (const std::vector<int>& hosts : {std::vector{1, 1}, {2, 1}, {2, 2, 1}, {3, 1, 3, 1}}) {
    SCOPED_TRACE(::testing::PrintToString(hosts));
    run_ranks_on_hosts(hosts, [](int) { expect_groups_as_whole_batch(); });
  }
}

TEST_F(BatchNormHostsTest, EqualsBatchNormOnTheWholeBatchOfSeventeenRanks) {
  run_ranks_on_hosts(
      {5, 4, 4, 3, 1}, [](int) { expect_groups_as_whole_batch(); }, kPatience);
}

TEST_F(BatchNormHostsTest, EqualsBatchNormOnTheWholeBatchOfTwentyFourRanks) {
  run_ranks_on_hosts(
      {6, 6, 6, 6}, [](int) { expect_as_whole_batch(64, dist::default_group()); }, kPatience);
}

// As on 17 hosts: every rank is a leader.
TEST(BatchNormGlooTest, EqualsBatchNormOnTheWholeBatchOfSeventeenRanks) {
  run_group(
      17, {.shared_memory = false}, [](int) { expect_as_whole_batch(5, dist::default_group()); },
      kPatience);
}

// The ranks' rows differ, and the ranks arrive in another order each time.
TEST_F(BatchNormHostsTest, TheOrderOfArrivalDoesNotChangeBits) {
  run_ranks_on_hosts({2, 1, 2}, [](int rank) {
    at::manual_seed(rank);
    const Tensor own = at::randn({3, 11}, at::kDouble);
    Tensor first;
    for (int turn = 0; turn < 5; ++turn) {
      if (turn > 0) ::usleep(static_cast<useconds_t>((rank + turn) % 5) * 20'000);
      SyncBatchNorm layer(11);
      layer->to(at::kDouble);
      layer(own);
      if (turn == 0) first = layer->running_mean.clone();
      EXPECT_TRUE(layer->running_mean.equal(first));
    }
    expect_equal_on_all_ranks(first, dist::default_group());
  });
}

TEST_F(BatchNormHostsTest, AllRanksMayBeEmpty) {
  run_ranks_on_hosts({2, 1}, [](int) {
    SyncBatchNorm layer(3);
    const Tensor input = at::zeros({0, 3}).requires_grad_();
    layer(input).sum().backward();
    EXPECT_TRUE(layer->running_mean.equal(at::zeros({3})));
    EXPECT_TRUE(layer->running_var.equal(at::ones({3})));
    EXPECT_EQ(input.grad().numel(), 0);
  });
}

TEST_F(BatchNormHostsTest, EveryRankLearnsWhoIsInWhichLayer) {
  for (const bool forward : {true, false}) {
    run_ranks_on_hosts({2, 2, 1}, [forward](int rank) {
      SyncBatchNorm first(SyncBatchNormOptions(3).name("first"));
      SyncBatchNorm second(SyncBatchNormOptions(3).name("second"));
      const auto batch = [] { return at::randn({4, 3}).requires_grad_(); };
      const Tensor a = first(batch());
      const Tensor b = second(batch());
      EXPECT_THAT(
          message_of<UserError>([&] {
            if (forward) {
              rank == 3 ? second(batch()) : first(batch());
            } else {
              (rank == 3 ? b : a).sum().backward();
            }
          }),
          AllOf(HasSubstr("ranks 0, 1, 2, 4 in layer 'first' (3 channels, Float, exchange 3)"),
                HasSubstr("rank 3 in layer 'second' (3 channels, Float, exchange 3)")));
    });
  }
}

TEST_F(BatchNormHostsTest, DifferentChannelsAreNamedOnEveryRank) {
  run_ranks_on_hosts({2, 1, 2}, [](int rank) {
    SyncBatchNorm narrow(SyncBatchNormOptions(3).name("narrow"));
    SyncBatchNorm wide(SyncBatchNormOptions(5).name("wide"));
    narrow(at::randn({4, 3}));
    EXPECT_THAT(message_of<UserError>([&] {
                  rank == 2 ? wide(at::randn({4, 5})) : narrow(at::randn({4, 3}));
                }),
                AllOf(HasSubstr("the ranks made different calls"),
                      HasSubstr("layer 'narrow' (3 channels, Float)"),
                      HasSubstr("layer 'wide' (5 channels, Float)"), HasSubstr("rank 2")));
  });
}

// The dead rank is a leader, or a rank with a leader.
TEST_F(BatchNormHostsTest, ADeadRankIsNamed) {
  for (const int dead : {2, 3}) {
    run_ranks_on_hosts({2, 2, 1}, [dead](int rank) {
      SyncBatchNorm layer(SyncBatchNormOptions(3).name("bn"));
      layer(at::randn({4, 3}));
      if (rank == dead) ::_exit(0);
      EXPECT_THAT(message_of<UnavailableError>([&] {
                    layer(at::randn({4, 3}));
                  }),
                  AllOf(HasSubstr("layer 'bn' (3 channels, Float)"),
                        HasSubstr(fmt::format("rank {} (", dead)), HasSubstr(") died")));
    });
  }
}

TEST_F(BatchNormHostsTest, ARankThatDoesNotComeIsNamedAtTheLayersTimeout) {
  run_ranks_on_hosts({2, 2, 1}, [](int rank) {
    const auto until_then = dist::new_group({0, 1, 2, 3, 4});
    SyncBatchNorm layer(
        SyncBatchNormOptions(3).name("bn").sync_timeout(std::chrono::milliseconds(1500)));
    layer(at::randn({4, 3}));
    if (rank == 3) return dist::barrier(until_then);
    EXPECT_THAT(message_of<UnavailableError>([&] {
                  layer(at::randn({4, 3}));
                }),
                AllOf(HasSubstr("layer 'bn' (3 channels, Float)"), HasSubstr("rank 3"),
                      HasSubstr("imed out")));
    dist::barrier(until_then);
  });
}

// Rank r has r + 1 batches; when it has its last one, ranks below it have none left.
TEST_F(BatchNormHostsTest, RanksThatHaveRunOutOfBatchesJoin) {
  run_ranks_on_hosts({2, 1}, [](int rank) {
    const auto batch = [](int step, int of) {
      at::manual_seed(100 * step + of);
      return at::randn({4, 3}, at::kDouble) + of;
    };
    nn::Sequential net((SyncBatchNorm(3)));
    net->to(at::kDouble);
    nn::BatchNorm1d whole(3);
    whole->to(at::kDouble);
    dist::DistributedDataParallel<nn::SequentialImpl> ddp(net);
    {
      auto guard = ddp.join();
      for (int step = 0; step <= rank; ++step) ddp(batch(step, rank)).square().sum().backward();
    }
    for (int step = 0; step < 3; ++step) {
      std::vector<Tensor> batches;
      for (int of = step; of < 3; ++of) batches.push_back(batch(step, of));
      whole(at::cat(batches));
    }
    const auto* layer = net[0]->as<SyncBatchNorm>();
    EXPECT_TRUE(close(layer->running_mean, whole->running_mean, 1e-12, 1e-12));
    EXPECT_TRUE(close(layer->running_var, whole->running_var, 1e-12, 1e-12));
  });
}

}  // namespace
}  // namespace syncbn::test
