#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "batch_norm/join_statistics.h"
#include "dist/group.h"
#include "dist/tensors.h"
#include "dist/training.h"
#include "groups/world.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::DistributedDataParallel;
using syncbn::base::UserError;
using syncbn::dist::detail::JoinStatistics;
using syncbn::test::BranchesImpl;
using syncbn::test::close;
using syncbn::test::message_of;
using syncbn::test::run_group;
using syncbn::test::run_group_and_collect;
using syncbn::test::sgd_step;
using ::testing::AllOf;
using ::testing::HasSubstr;

nn::Linear linear() {
  return nn::Linear(nn::LinearOptions(2, 1).bias(false));
}

/// Rank r has r + 1 inputs; those of step s have the value s + 1.
int number_of_inputs(int rank) {
  return rank + 1;
}

template <class Value>
void expect_same_on_all_ranks(const Value& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const auto all = dist::all_gather(tensor);
    for (const at::Tensor& other : all) EXPECT_TRUE(other.equal(all[0]));
  }
}

TEST(DdpJoinTest, GradientsAreDividedByTheInitialWorldSizeOrByTheRanksLeft) {
  run_group(3, [](int rank) {
    for (const bool initial : {true, false}) {
      nn::Linear net = linear();
      DistributedDataParallel<nn::LinearImpl> ddp(net);
      {
        const auto guard = ddp.join({.divide_by_initial_world_size = initial});
        for (int step = 0; step < number_of_inputs(rank); ++step) {
          ddp.zero_grad();
          ddp(at::full({1, 2}, 6.0)).sum().backward();
          const int left = 3 - step;
          const double expected = initial ? 6.0 * left / 3 : 6.0;
          EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, expected))) << "step " << step;
        }
      }
      // Afterwards, steps work as without join().
      ddp.zero_grad();
      ddp(at::full({1, 2}, 6.0)).sum().backward();
      EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 6.0)));
    }
  });
}

TEST(DdpJoinTest, AllRanksEndWithTheModelOfTheLast) {
  run_group(3, [](int rank) {
    nn::Sequential net(nn::Linear(2, 4), nn::BatchNorm1d(4), nn::Linear(4, 1));
    DistributedDataParallel<nn::SequentialImpl> ddp(net, {.bucket_cap_mb = 1e-5});
    at::Tensor own_mean;
    {
      const auto guard = ddp.join();
      for (int step = 0; step < number_of_inputs(rank) + 2; ++step) {
        at::manual_seed(step * 10 + rank);
        ddp(at::randn({4, 2})).pow(2).sum().backward();
        sgd_step(*net);
      }
      own_mean = net->named_buffers()["1.running_mean"].clone();
    }
    expect_same_on_all_ranks(net->parameters());
    expect_same_on_all_ranks(net->buffers());
    dist::broadcast(own_mean, 2);
    EXPECT_TRUE(net->named_buffers()["1.running_mean"].equal(own_mean)) << "rank 2 was the last";
  });
}

TEST(DdpJoinTest, StepsUnderNoSyncAreAccumulatedHere) {
  run_group(2, [](int rank) {
    nn::Linear net = linear();
    DistributedDataParallel<nn::LinearImpl> ddp(net);
    const auto guard = ddp.join();
    // Rank 0 has no input, so each all-reduce halves rank 1's gradients.
    for (int round = 0; round < 2 * rank; ++round) {
      ddp.zero_grad();
      {
        const auto no_sync = ddp.no_sync();
        ddp(at::full({1, 2}, 3.0)).sum().backward();
        EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 3.0)));
      }
      ddp(at::full({1, 2}, 5.0)).sum().backward();
      EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 4.0)));
    }
  });
}

TEST(DdpJoinTest, WorksWithTheSearchForUnusedParametersAndWithAStaticGraph) {
  run_group(2, [](int rank) {
    for (const bool is_static : {false, true}) {
      auto net = std::make_shared<BranchesImpl>();
      DistributedDataParallel<BranchesImpl> ddp(
          net, {.find_unused_parameters = !is_static, .static_graph = is_static});
      {
        const auto guard = ddp.join();
        for (int step = 0; step < rank * 4; ++step) {
          ddp.zero_grad();
          const bool use_right = !is_static && step % 2 == 1;
          ddp(at::full({1, 2}, 2.0), use_right).sum().backward();
          const nn::Linear& used = use_right ? net->right : net->left;
          const nn::Linear& unused = use_right ? net->left : net->right;
          EXPECT_TRUE(close(used->weight.grad(), at::full({2, 2}, 1.0))) << step;
          EXPECT_FALSE(unused->weight.grad().defined());
        }
      }
      expect_same_on_all_ranks(net->parameters());
    }
  });
}

struct SyncNetImpl : nn::Module {
  explicit SyncNetImpl(const dist::ProcessGroupPtr& group = {}) {
    first = register_module("first", nn::Linear(3, 6));
    norm = register_module("norm",
                           dist::SyncBatchNorm(dist::SyncBatchNormOptions(6).process_group(group)));
    second = register_module("second", nn::Linear(6, 6));
    converted = register_module("converted", nn::BatchNorm1d(6));
    third = register_module("third", nn::Linear(6, 2));
    dist::convert_sync_batchnorm(*converted, group);
  }
  at::Tensor forward(const at::Tensor& input) {
    return third(at::relu(converted(second(at::relu(norm(first(input)))))));
  }
  nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  dist::SyncBatchNorm norm{nullptr};
  nn::BatchNorm1d converted{nullptr};
};

/// Rank r has r + 1 batches. In each step, the reference uses all batches of that step at once.
void expect_trains_as_on_all_batches(int world_size, const dist::DdpOptions& options,
                                     const dist::CommHook& hook = nullptr, double rtol = 1.3e-6) {
  run_group(world_size, [&](int rank) {
    at::manual_seed(5);
    auto net = std::make_shared<SyncNetImpl>();
    at::manual_seed(5);
    auto whole = std::make_shared<SyncNetImpl>(dist::new_subgroups(1));
    DistributedDataParallel<SyncNetImpl> ddp(net, options);
    if (hook) ddp.register_comm_hook(hook);
    const auto batch_of = [](int step, int of_rank) {
      at::manual_seed(100 * step + of_rank);
      return at::randn({4, 3});
    };
    for (int step = 0; step < world_size; ++step) {
      std::vector<at::Tensor> batches;
      for (int r = step; r < world_size; ++r) batches.push_back(batch_of(step, r));
      (whole->forward(at::cat(batches)).pow(2).sum() / world_size).backward();
      sgd_step(*whole);
    }
    {
      const auto guard = ddp.join();
      for (int step = 0; step < number_of_inputs(rank); ++step) {
        ddp(batch_of(step, rank)).pow(2).sum().backward();
        sgd_step(*net);
      }
    }
    const auto expect_equal = [&](const auto& actual, const auto& expected) {
      for (const auto& item : actual) {
        EXPECT_TRUE(close(item.value(), *expected.find(item.key()), rtol, 1e-5)) << item.key();
      }
    };
    expect_equal(net->named_parameters(), whole->named_parameters());
    expect_equal(net->named_buffers(), whole->named_buffers());
  });
}

TEST(DdpJoinTest, SyncBatchNormSeesTheBatchesOfTheRanksThatHaveSome) {
  for (const int world_size : {2, 3, 4}) expect_trains_as_on_all_batches(world_size, {});
}

TEST(DdpJoinTest, SyncBatchNormWithSeveralBucketsAndWithoutBufferBroadcast) {
  expect_trains_as_on_all_batches(3, {.broadcast_buffers = false, .bucket_cap_mb = 1e-5});
}

// The hook blocks the backward thread until its own communication has ended.
TEST(DdpJoinTest, SyncBatchNormWithAHookThatBlocks) {
  expect_trains_as_on_all_batches(2, {.bucket_cap_mb = 1e-5}, [](c10d::GradBucket& bucket) {
    auto future = dist::allreduce_hook()(bucket);
    future->wait();
    return future;
  });
}

TEST(DdpJoinTest, AnEvaluationInsideIsNobodyElsesConcern) {
  run_group(2, [](int rank) {
    auto net = std::make_shared<SyncNetImpl>();
    DistributedDataParallel<SyncNetImpl> ddp(net);
    const auto guard = ddp.join();
    for (int step = 0; step < 1 + 2 * rank; ++step) {
      ddp(at::randn({4, 3})).sum().backward();
      const at::NoGradGuard no_grad;
      ddp.eval();
      for (int batch = 0; batch <= rank; ++batch) ddp(at::randn({4, 3}));
      ddp.train();
    }
  });
}

TEST(DdpJoinTest, ThrowOnEarlyTerminationEndsEveryRank) {
  run_group(2, [](int rank) {
    nn::Linear net = linear();
    DistributedDataParallel<nn::LinearImpl> ddp(net);
    const auto train = [&] {
      auto guard = ddp.join({.throw_on_early_termination = true});
      for (int step = 0; step < 1 + rank * 5; ++step) ddp(at::ones({1, 2})).sum().backward();
      guard.finish();
    };
    EXPECT_THROW(train(), dist::EarlyTermination);
    // The join context has ended, and the group still works.
    dist::barrier();
    const auto guard = ddp.join();
  });
}

TEST(DdpJoinTest, RanksOfASubgroupAreNamedAsInTheWorld) {
  run_group(3, [](int rank) {
    const auto group = dist::new_group({1, 2});
    if (rank == 0) return dist::barrier();
    nn::Linear net = linear();
    DistributedDataParallel<nn::LinearImpl> ddp(net, {.process_group = group});
    const auto train = [&] {
      auto guard = ddp.join({.throw_on_early_termination = true});
      for (int step = 0; step < rank; ++step) ddp(at::ones({1, 2})).sum().backward();
      guard.finish();
    };
    const std::string early = message_of<dist::EarlyTermination>(train);
    EXPECT_THAT(early, HasSubstr(rank == 1 ? "rank 1 has run out of input" : "another rank has"));
    JoinStatistics statistics(group, {at::kCPU});
    statistics.begin_step([] { return true; });
    EXPECT_THAT(message_of<UserError>([&] { statistics.end_forward(rank == 1); }),
                HasSubstr("ranks 1 and 2 are at different SyncBatchNorm layers"));
    dist::barrier();
  });
}

// Rows of this size are too large to be gathered in one hop.
TEST(DdpJoinTest, DifferentLayersAreNamedWhereRowsAreAddedUpOnTheWay) {
  run_group(3, [](int rank) {
    constexpr int64_t kChannels = 20'000;
    const auto group = dist::default_group();
    const auto options = dist::SyncBatchNormOptions(kChannels).process_group(group);
    JoinStatistics statistics(group, {at::kCPU});
    if (rank == 0) {
      EXPECT_TRUE(statistics.serve()) << "the forward";
      EXPECT_FALSE(statistics.serve()) << "the backward";
      return;
    }
    dist::SyncBatchNorm first(dist::SyncBatchNormOptions(options).name("first"));
    dist::SyncBatchNorm second(dist::SyncBatchNormOptions(options).name("second"));
    statistics.begin_step([] { return true; });
    const at::Tensor a = first(at::randn({4, kChannels}).requires_grad_());
    const at::Tensor b = second(at::randn({4, kChannels}).requires_grad_());
    statistics.end_forward(/*backward_follows=*/true);
    EXPECT_THAT(message_of<UserError>([&] { (rank == 1 ? a : b).sum().backward(); }),
                AllOf(HasSubstr("rank 1 in layer 'first'"), HasSubstr("rank 2 in layer 'second'")));
    statistics.end_backward();
  });
}

TEST(DdpJoinTest, AnExceptionInsideIsNotWaitedWith) {
  run_group(2, [](int rank) {
    nn::Linear net = linear();
    DistributedDataParallel<nn::LinearImpl> ddp(net);
    const auto fail = [&] {
      const auto guard = ddp.join();
      throw std::runtime_error("of the loop");
    };
    // Rank 0 must not wait for rank 1.
    if (rank == 0) {
      EXPECT_THROW(fail(), std::runtime_error);
    }
    const auto guard = ddp.join();
  });
}

TEST(DdpJoinTest, DisabledItDoesNothing) {
  run_group(2, [](int rank) {
    nn::Linear net = linear();
    DistributedDataParallel<nn::LinearImpl> ddp(net);
    const auto collectives = [&] {
      return dist::detail::backend_of(dist::default_group())->sequence();
    };
    const auto step = [&] {
      const uint64_t before = collectives();
      ddp.zero_grad();
      ddp(at::full({1, 2}, rank * 2.0)).sum().backward();
      EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 1.0)));
      return collectives() - before;
    };
    step();
    step();  // rebuilds the buckets
    const uint64_t without = step();
    const auto guard = ddp.join({.enable = false});
    EXPECT_EQ(step(), without);
  });
}

TEST(DdpJoinTest, WhatCannotWorkIsRefused) {
  run_group(2, [](int) {
    const auto refuses = [](auto& ddp, const char* why) {
      EXPECT_THAT(message_of<UserError>([&] { const auto guard = ddp.join(); }), HasSubstr(why));
    };
    nn::Linear net = linear();
    DistributedDataParallel<nn::LinearImpl> nested(net);
    {
      const auto guard = nested.join();
      refuses(nested, "open already");
      nn::Linear another = linear();
      DistributedDataParallel<nn::LinearImpl> second(another);
      refuses(second, "open already");
    }
    DistributedDataParallel<nn::LinearImpl> skipping(
        net, {.find_unused_parameters = true, .skip_all_reduce_unused_params = true});
    refuses(skipping, "skip_all_reduce_unused_params");
    auto alone = std::make_shared<SyncNetImpl>(dist::new_subgroups(1));
    DistributedDataParallel<SyncNetImpl> other_ranks(alone);
    refuses(other_ranks, "other ranks");
    auto same = std::make_shared<SyncNetImpl>(dist::default_group());
    DistributedDataParallel<SyncNetImpl> same_group(same);
    refuses(same_group, "own group");
  });
}

TEST(DdpJoinFaultTest, ARankThatDiesIsReportedToTheOnesThatWait) {
  const auto results = run_group_and_collect(2, [](int rank) {
    auto net = std::make_shared<SyncNetImpl>();
    DistributedDataParallel<SyncNetImpl> ddp(net);
    const auto guard = ddp.join();
    for (int step = 0; step < 1 + rank * 2; ++step) {
      const at::Tensor loss = ddp(at::randn({4, 3})).sum();
      if (step == 2) ::raise(SIGKILL);
      loss.backward();
    }
  });
  EXPECT_EQ(results[0].exit_code, syncbn::base::kExitUnavailable) << results[0].output;
}

}  // namespace
