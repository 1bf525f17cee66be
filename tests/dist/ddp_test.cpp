#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>

#include <memory>
#include <utility>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "dist/group.h"
#include "dist/tensors.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::DistributedDataParallel;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::run_group;

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
  run_group(2, [](int) {
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
  run_group(2, [](int rank) {
    struct Scorer : nn::Module {
      at::Tensor scores(const at::Tensor& input, double scale) { return linear(input) * scale; }
      nn::Linear linear = register_module("linear", nn::Linear(2, 2));
    };
    auto net = std::make_shared<Scorer>();
    DistributedDataParallel<Scorer> ddp(net);
    ddp.invoke(&Scorer::scores, at::full({1, 2}, rank + 1.0), 3.0).sum().backward();
    EXPECT_TRUE(close(net->linear->weight.grad(), at::full({2, 2}, 3 * 1.5)));
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
  run_group(1, [](int) {
    auto net = std::make_shared<OpaqueOutputImpl>();
    DistributedDataParallel<OpaqueOutputImpl> ddp(net, {.find_unused_parameters = true});
    EXPECT_THROW(ddp(at::ones({1, 2})), UserError);
  });
}

TEST(DdpTest, BroadcastsRankZerosBuffersBeforeEachForward) {
  run_group(2, [](int rank) {
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

TEST(DdpTest, AModuleWithNothingToTrainIsRefused) {
  run_group(1, [](int) {
    nn::Sequential net;
    EXPECT_THROW(DistributedDataParallel<nn::SequentialImpl>{net}, UserError);
  });
}

}  // namespace
