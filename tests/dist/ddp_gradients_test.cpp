// Gradients of parameters that are not used exactly once in each backward on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>

#include <initializer_list>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "dist/group.h"
#include "dist/tensors.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using dist::DistributedDataParallel;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::message_of;
using syncbn::test::run_group;
using ::testing::HasSubstr;

/// One weight matrix [1, 2] and no bias: its gradient is the sum of the inputs.
nn::Linear make_layer() {
  return nn::Linear(nn::LinearOptions(2, 1).bias(false));
}

at::Tensor inputs_of(int rank) {
  return at::full({1, 2}, rank + 1.0);
}

TEST(DdpGradientsTest, ThreeBackwardsAccumulateOverRanksAndSteps) {
  run_group(2, [](int rank) {
    for (const bool views : {false, true}) {
      SCOPED_TRACE(views);
      nn::Linear net = make_layer();
      DistributedDataParallel<nn::LinearImpl> ddp(net, {.gradient_as_bucket_view = views});
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        EXPECT_FALSE(net->weight.grad().defined());
        {
          const auto guard = ddp.no_sync();
          for (int i = 1; i <= 2; ++i) {
            ddp(inputs_of(rank)).sum().backward();
            EXPECT_TRUE(close(net->weight.grad(), inputs_of(rank) * i)) << "this rank's own";
          }
        }
        ddp(inputs_of(rank)).sum().backward();
        EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, 3 * 1.5)));
      }
    }
  });
}

TEST(DdpGradientsTest, WithoutZeroingTheNextMeanIsAdded) {
  run_group(2, [](int rank) {
    for (const bool views : {false, true}) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << views << ", " << accumulate);
        nn::Linear net = make_layer();
        DistributedDataParallel<nn::LinearImpl> ddp(net, {.gradient_as_bucket_view = views});
        for (int step = 1; step <= 3; ++step) {
          if (accumulate) {
            const auto guard = ddp.no_sync();
            ddp(inputs_of(rank)).sum().backward();
          }
          ddp(inputs_of(rank)).sum().backward();
          const double of_each_step = accumulate ? 2 * 1.5 : 1.5;
          EXPECT_TRUE(close(net->weight.grad(), at::full({1, 2}, of_each_step * step)));
        }
      }
    }
  });
}

TEST(DdpGradientsTest, FrozenParametersStayAsRankZeroHadThem) {
  run_group(2, [](int rank) {
    at::manual_seed(static_cast<uint64_t>(rank));
    nn::Linear frozen(2, 2);
    nn::Linear trained(2, 1);
    for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    nn::Sequential net(frozen, trained);
    DistributedDataParallel<nn::SequentialImpl> ddp(net);
    const std::vector<at::Tensor> everyones = dist::all_gather(frozen->weight);
    EXPECT_TRUE(everyones[0].equal(everyones[1])) << "they are synchronised nevertheless";
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      ddp(inputs_of(rank)).sum().backward();
      EXPECT_FALSE(frozen->weight.grad().defined());
      // d output / d weight is the frozen layer's output, which is linear in the input: its mean
      // over ranks is the output for the mean input.
      const at::Tensor expected = frozen(at::full({1, 2}, 1.5));
      EXPECT_TRUE(close(trained->weight.grad(), expected));
    }
    frozen->bias.set_requires_grad(true);
    EXPECT_THAT(message_of<UserError>([&] { ddp(inputs_of(rank)); }),
                HasSubstr("the parameter 0.bias requires a gradient now"));
    const at::NoGradGuard no_grad;
    ddp(inputs_of(rank));
  });
}

/// weight(weight(x)) with one weight under two names.
struct SharedImpl : nn::Module {
  SharedImpl() : inner(nn::LinearOptions(2, 2).bias(false)), outer(inner) {
    register_module("inner", inner);
    register_module("outer", outer);
  }
  at::Tensor forward(const at::Tensor& input) { return outer(inner(input)); }
  nn::Linear inner;
  nn::Linear outer;
};

TEST(DdpGradientsTest, ASharedParameterGetsTheSumOfItsUsesOnce) {
  run_group(2, [](int rank) {
    auto net = std::make_shared<SharedImpl>();
    auto alone = std::make_shared<SharedImpl>();
    DistributedDataParallel<SharedImpl> ddp(net);
    {
      const at::NoGradGuard no_grad;
      alone->inner->weight.copy_(net->inner->weight);
    }
    // The loss is linear in the input: its mean over ranks is the loss of the mean input.
    alone->forward(at::full({1, 2}, 1.5)).sum().backward();
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      ddp(inputs_of(rank)).sum().backward();
      EXPECT_TRUE(close(net->inner->weight.grad(), alone->inner->weight.grad()));
    }
  });
}

TEST(DdpGradientsTest, ALayerUsedTwiceInOneForwardIsAveragedAfterItsLastUse) {
  run_group(2, [](int rank) {
    nn::Linear layer(nn::LinearOptions(1, 1).bias(false));
    nn::Sequential net(layer, layer, layer);
    DistributedDataParallel<nn::SequentialImpl> ddp(net, {.bucket_cap_mb = 1e-6});
    {
      const at::NoGradGuard no_grad;
      layer->weight.fill_(2);
    }
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      ddp(at::full({1, 1}, rank + 1.0)).sum().backward();
      EXPECT_TRUE(close(layer->weight.grad(), at::full({1, 1}, 3 * 4 * 1.5))) << "3 w^2 x";
    }
  });
}

/// One of its two paths has no parameters except the common scale.
struct DetourImpl : nn::Module {
  at::Tensor forward(const at::Tensor& input, bool detour) {
    return detour ? at::relu(input) * scale : layer(input) * scale;
  }
  nn::Linear layer = register_module("layer", make_layer());
  at::Tensor scale = register_parameter("scale", at::ones({1}));
};

TEST(DdpGradientsTest, APathWithoutParametersCountsAsZeroWhereTheOthersUsedThem) {
  run_group(2, [](int rank) {
    auto net = std::make_shared<DetourImpl>();
    DistributedDataParallel<DetourImpl> ddp(net, {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      ddp.zero_grad();
      // Rank 0 takes the detour in the odd steps, rank 1 in the last two.
      const bool detour = rank == 0 ? step % 2 == 1 : step >= 2;
      ddp(inputs_of(rank), detour).sum().backward();
      const double of_first = step % 2 == 1 ? 0 : 1;
      const double of_second = step >= 2 ? 0 : 2;
      if (step == 3) {
        EXPECT_FALSE(net->layer->weight.grad().defined()) << "no rank used it";
      } else {
        EXPECT_TRUE(close(net->layer->weight.grad(), at::full({1, 2}, (of_first + of_second) / 2)));
      }
      EXPECT_TRUE(net->scale.grad().defined());
    }
  });
}

at::Tensor rows(std::initializer_list<int64_t> indices) {
  return at::tensor(indices, at::kLong);
}

TEST(DdpGradientsTest, SparseEmbeddingsAreAveragedByRow) {
  run_group(2, [](int rank) {
    for (const double cap : {25.0, 1e-6}) {
      nn::Embedding table(nn::EmbeddingOptions(5, 2).sparse(true));
      nn::Linear head = make_layer();
      nn::Sequential net(table, head);
      DistributedDataParallel<nn::SequentialImpl> ddp(net, {.bucket_cap_mb = cap});
      {
        const at::NoGradGuard no_grad;
        head->weight.fill_(1);
      }
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        // Rank 0 uses row 0, both ranks use row 1 (rank 1 twice), rank 1 uses row 4.
        ddp(rank == 0 ? rows({0, 1}) : rows({1, 1, 4})).sum().backward();
        const at::Tensor gradient = table->weight.grad();
        ASSERT_TRUE(gradient.is_sparse());
        const at::Tensor expected = at::tensor({0.5, 1.5, 0.0, 0.0, 0.5}).view({5, 1});
        EXPECT_TRUE(close(gradient.to_dense(), expected.expand({5, 2})));
        EXPECT_FALSE(head->weight.grad().is_sparse());
      }
    }
  });
}

TEST(DdpGradientsTest, LayersWithoutParametersAreNoHindrance) {
  run_group(2, [](int rank) {
    const nn::Linear layer = make_layer();
    nn::Sequential net(nn::Functional([](const at::Tensor& x) { return x * 2; }), layer,
                       nn::Functional([](const at::Tensor& x) { return x * 3; }));
    DistributedDataParallel<nn::SequentialImpl> ddp(net);
    ddp(inputs_of(rank)).sum().backward();
    EXPECT_TRUE(close(layer->weight.grad(), at::full({1, 2}, 2 * 3 * 1.5)));
  });
}

}  // namespace
