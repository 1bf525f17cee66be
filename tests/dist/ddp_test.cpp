#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <map>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "dist/tensors.h"
#include "dist/training.h"
#include "support/multiproc.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::DistributedDataParallel;
using syncbn::base::UserError;
using syncbn::test::BranchesImpl;
using syncbn::test::close;
using syncbn::test::run_ranks;
using syncbn::test::run_ranks_and_collect;
using ::testing::AllOf;
using ::testing::HasSubstr;

enum class Norm { kNone, kSync };

struct NetImpl : nn::Module {
  explicit NetImpl(Norm norm = Norm::kNone, int64_t hidden = 10) {
    first = register_module("first", nn::Linear(2, hidden));
    if (norm == Norm::kSync) {
      batch_norm =
          register_module("batch_norm", dist::SyncBatchNorm(dist::SyncBatchNormOptions(hidden)));
    }
    second = register_module("second", nn::Linear(hidden, 50));
    third = register_module("third", nn::Linear(50, 4));
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = at::relu(first(input));
    if (batch_norm) x = batch_norm(x);
    return third(at::relu(second(x))).softmax(1);
  }
  nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  dist::SyncBatchNorm batch_norm{nullptr};
};
TORCH_MODULE(Net);

TEST(DdpTest, ABranchThatOneRankUsesIsAveragedOverAll) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    auto net = std::make_shared<BranchesImpl>();
    DistributedDataParallel<BranchesImpl> ddp(net, {.find_unused_parameters = true});
    ddp(at::ones({1, 2}), rank == 1).sum().backward();
    EXPECT_TRUE(close(net->left->weight.grad(), at::full({2, 2}, 0.5)));
    EXPECT_TRUE(close(net->right->weight.grad(), at::full({2, 2}, 0.5)));
  });
}

struct TwoHeadsImpl : nn::Module {
  TwoHeadsImpl() {
    left = register_module("left", nn::Linear(2, 2));
    right = register_module("right", nn::Linear(2, 2));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& input) {
    return {left(input), right(input)};
  }
  nn::Linear left{nullptr}, right{nullptr};
};

TEST(DdpTest, AnOutputThatTheLossLeavesOutIsNotWaitedFor) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    auto net = std::make_shared<TwoHeadsImpl>();
    DistributedDataParallel<TwoHeadsImpl> ddp(net, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      ddp(at::ones({1, 2})).first.sum().backward();
      EXPECT_TRUE(close(net->left->weight.grad(), at::ones({2, 2})));
      EXPECT_FALSE(net->right->weight.grad().defined());
    }
  });
}

TEST(DdpTest, InvokesAnotherFunctionOfTheModule) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    struct Scorer : NetImpl {
      at::Tensor scores(const at::Tensor& input, double scale) { return forward(input) * scale; }
    };
    auto net = std::make_shared<Scorer>();
    DistributedDataParallel<Scorer> ddp(net);
    ddp.invoke(&Scorer::scores, at::full({1, 2}, rank + 1.0), 3.0).select(1, 0).sum().backward();
    const at::Tensor own = net->first->weight.grad();
    EXPECT_GT(own.abs().max().item<double>(), 0);
    at::Tensor first = own.clone();
    dist::broadcast(first, 0);
    EXPECT_TRUE(at::equal(own, first)) << "the mean over the ranks";
  });
}

struct OpaqueOutputImpl : nn::Module {
  OpaqueOutputImpl() { linear = register_module("linear", nn::Linear(2, 2)); }
  std::shared_ptr<at::Tensor> forward(const at::Tensor& input) {
    return std::make_shared<at::Tensor>(linear(input));
  }
  nn::Linear linear{nullptr};
};

TEST(DdpTest, LookingForUnusedParametersInAnOutputWithoutTensorsIsRefused) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    auto net = std::make_shared<OpaqueOutputImpl>();
    DistributedDataParallel<OpaqueOutputImpl> ddp(net, {.find_unused_parameters = true});
    EXPECT_THROW(ddp(at::ones({1, 2})), UserError);
  });
}

struct ManyOutputsImpl : nn::Module {
  ManyOutputsImpl() { linear = register_module("linear", nn::Linear(2, 2)); }
  using Output =
      std::pair<std::optional<at::Tensor>, std::map<std::string, std::vector<at::Tensor>>>;
  Output forward(const at::Tensor& input) {
    return {std::nullopt, {{"a", {linear(input), linear(input * 2)}}}};
  }
  nn::Linear linear{nullptr};
};

TEST(DdpTest, FindsTensorsInsideContainers) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    auto net = std::make_shared<ManyOutputsImpl>();
    DistributedDataParallel<ManyOutputsImpl> ddp(net, {.find_unused_parameters = true});
    const auto output = ddp(at::full({1, 2}, rank * 2.0));
    output.second.at("a")[1].sum().backward();
    EXPECT_TRUE(close(net->linear->weight.grad(), at::full({2, 2}, 2.0)));
  });
}

TEST(DdpTest, BroadcastsRankZerosBuffersBeforeEachForward) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    for (const bool broadcast : {true, false}) {
      nn::BatchNorm1d net(3);
      DistributedDataParallel<nn::BatchNorm1dImpl> ddp(net, {.broadcast_buffers = broadcast});
      const at::Tensor input = at::randn({4, 3}) + rank;
      ddp(input);
      const std::vector<at::Tensor> means = dist::all_gather(net->running_mean);
      EXPECT_FALSE(means[0].equal(means[1])) << "a buffer broadcast does not share statistics";
      net->eval();
      ddp(input);
      const at::Tensor expected = broadcast ? means[0] : means[static_cast<size_t>(rank)];
      EXPECT_TRUE(net->running_mean.equal(expected));
    }
  });
}

TEST(DdpTest, TwoForwardsBeforeOneBackwardWorkWithBuffers) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    // Batch norm's backward needs the running statistics, which the second forward's broadcast
    // overwrites.
    nn::Sequential net(nn::Linear(2, 3), nn::BatchNorm1d(3));
    DistributedDataParallel<nn::SequentialImpl> ddp(net);
    const at::Tensor first = ddp(at::randn({4, 2}));
    const at::Tensor second = ddp(at::randn({4, 2}));
    (first.pow(2).sum() + second.pow(2).sum()).backward();
    EXPECT_TRUE(net->parameters()[0].grad().defined());
  });
}

TEST(DdpTest, DifferentParametersAreNamedOnEveryRank) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    Net net(Norm::kNone, rank == 0 ? 10 : 12);
    try {
      DistributedDataParallel<NetImpl> ddp(net);
      FAIL() << "different shapes were accepted";
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 0 has first.weight [10, 2]"),
                                      HasSubstr("rank 1 has first.weight [12, 2]")));
    }
  });
}

TEST(DdpTest, AModuleWithNothingToTrainIsRefused) {
  run_ranks(1, [](int) {
    dist::init_process_group();
    nn::Sequential net;
    EXPECT_THROW(DistributedDataParallel<nn::SequentialImpl>{net}, UserError);
  });
}

TEST(DdpFaultTest, APeerKilledDuringBackwardIsReportedWithTheCollective) {
  const auto results = run_ranks_and_collect({.world_size = 2}, [](int rank) {
    dist::init_process_group();
    Net net;
    DistributedDataParallel<NetImpl> ddp(net);
    const at::Tensor loss = ddp(at::randn({4, 2})).sum();
    if (rank == 1) ::raise(SIGKILL);
    loss.backward();
  });
  EXPECT_EQ(results[0].exit_code, syncbn::base::kExitUnavailable) << results[0].output;
  EXPECT_THAT(results[0].output, AllOf(HasSubstr("rank 0 of 2"), HasSubstr("all_reduce #")));
}

}  // namespace
