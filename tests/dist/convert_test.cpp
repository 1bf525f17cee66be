#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <cstdlib>
#include <sstream>

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/parallel/data_parallel.h>

#include "batch_norm/convert.h"
#include "dist/convert_cases.h"
#include "dist/tensors.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::exchanges;
using syncbn::test::expect_trains_as_whole_batch;
using syncbn::test::Gradients;
using syncbn::test::kLayers;
using syncbn::test::message_of;
using syncbn::test::run_ranks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Batch norm in a Sequential, in holders and in a container of a container.
struct NetImpl : nn::Module {
  NetImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 4, 3)));
    first = register_module("first", nn::BatchNorm2d(4));
    blocks = register_module("blocks", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(4, 4, 1)),
                                                      nn::BatchNorm2d(4), nn::ReLU()));
    list = register_module(
        "list",
        nn::ModuleList(nn::Sequential(nn::Conv2d(nn::Conv2dOptions(4, 4, 1)), nn::BatchNorm2d(4))));
    last = register_module("last",
                           nn::BatchNorm1d(nn::BatchNorm1dOptions(4).track_running_stats(false)));
    cumulative = register_module("cumulative",
                                 nn::BatchNorm1d(nn::BatchNormOptions(4).momentum(std::nullopt)));
    linear = register_module("linear", nn::Linear(4, 2));
  }
  at::Tensor forward(at::Tensor x) {
    x = blocks->forward(first(conv(x)));
    x = list[0]->as<nn::SequentialImpl>()->forward(x);
    return linear(cumulative(last(x.mean({2, 3}))));
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d first{nullptr};
  nn::Sequential blocks{nullptr};
  nn::ModuleList list{nullptr};
  nn::BatchNorm1d last{nullptr};
  nn::BatchNorm1d cumulative{nullptr};
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Net);

TEST(ConvertTest, NamesEveryLayerAndTrainsAsOnTheWholeBatch) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(0);
    Net net;
    at::manual_seed(0);
    Net reference;
    const auto report = dist::convert_sync_batchnorm(*net);
    EXPECT_THAT(report.converted,
                ElementsAre("first", "blocks.1", "list.0.1", "last", "cumulative"));
    EXPECT_TRUE(report.not_converted.empty());
    dist::DistributedDataParallel<NetImpl> ddp(net);
    expect_trains_as_whole_batch([&](const at::Tensor& x) { return ddp(x); }, net->parameters(),
                                 [&](const at::Tensor& x) { return reference->forward(x); },
                                 reference->parameters(), rank, Gradients::kAveraged);
    EXPECT_TRUE(close(net->first->running_var, reference->first->running_var));
    EXPECT_TRUE(close(net->cumulative->running_mean, reference->cumulative->running_mean));
  });
}

TEST(ConvertTest, AfterWarmUpAndToDoubleTheLayersAreStillConverted) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    at::manual_seed(0);
    Net net;
    net->forward(at::randn({4, 3, 6, 6})).sum().backward();
    dist::convert_sync_batchnorm(*net);
    net->to(at::kDouble);
    exchanges();
    const uint64_t before = exchanges();
    at::manual_seed(rank);
    net->forward(at::randn({4, 3, 6, 6}, at::kDouble));
    EXPECT_EQ(exchanges() - before, static_cast<uint64_t>(kLayers));
  });
}

TEST(ConvertTest, RevertAndEvaluationAndOtherModulesExchangeNothing) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    Net net;
    Net other;
    dist::convert_sync_batchnorm(*net);
    exchanges();
    const uint64_t before = exchanges();
    const at::Tensor batch = at::randn({4, 3, 6, 6});
    other->forward(batch);
    net->eval();
    net->forward(batch);
    net->train();
    dist::revert_sync_batchnorm(*net);
    net->forward(batch);
    EXPECT_EQ(exchanges(), before);
  });
}

TEST(ConvertTest, TheRootItselfIsConverted) {
  run_ranks(2, [](int rank) {
    dist::init_process_group();
    nn::BatchNorm1d layer(3);
    EXPECT_THAT(dist::convert_sync_batchnorm(*layer).converted, ElementsAre(""));
    const at::Tensor batch = at::randn({6, 3});
    at::Tensor sum = batch.sum(0);
    dist::all_reduce(sum);
    layer(batch);
    EXPECT_TRUE(close(layer->running_mean, sum / 12 * 0.1));
    EXPECT_EQ(dist::rank(), rank);
  });
}

TEST(ConvertTest, ALayerWithoutStatisticsAndWeightIsListed) {
  nn::Sequential net(
      nn::BatchNorm1d(nn::BatchNorm1dOptions(3).affine(false).track_running_stats(false)));
  const auto report = dist::convert_sync_batchnorm(*net);
  EXPECT_TRUE(report.converted.empty());
  ASSERT_EQ(report.not_converted.size(), 1u);
  EXPECT_EQ(report.not_converted[0].name, "0");
}

TEST(ConvertTest, WhatTheLayersHaveStaysTheirs) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    Net net;
    net->first->weight.set_requires_grad(false);
    net->last->eval();
    int hooked = 0;
    net->cumulative->weight.register_hook([&](const at::Tensor&) { ++hooked; });
    const auto tensors = [&] {
      std::vector<const at::TensorImpl*> all;
      for (const at::Tensor& one : net->parameters()) all.push_back(one.unsafeGetTensorImpl());
      for (const at::Tensor& one : net->buffers()) all.push_back(one.unsafeGetTensorImpl());
      return all;
    };
    const auto before = tensors();
    const auto names = net->named_parameters().keys();
    dist::convert_sync_batchnorm(*net);
    EXPECT_EQ(tensors(), before);
    EXPECT_EQ(net->named_parameters().keys(), names);
    EXPECT_FALSE(net->first->weight.requires_grad());
    EXPECT_FALSE(net->last->is_training());
    EXPECT_TRUE(net->first->is_training());
    net->forward(at::randn({4, 3, 6, 6})).sum().backward();
    EXPECT_EQ(hooked, 1);
  });
}

TEST(ConvertTest, ALayerThatIsReferencedTwiceExchangesWhereverItIsCalled) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    nn::BatchNorm1d shared(3);
    nn::Sequential net(shared, nn::Linear(3, 3), shared);
    EXPECT_THAT(dist::convert_sync_batchnorm(*net).converted, ElementsAre("0"));
    exchanges();
    const uint64_t before = exchanges();
    net->forward(at::randn({4, 3}));
    shared(at::randn({4, 3}));
    EXPECT_EQ(exchanges() - before, 3u);
  });
}

TEST(ConvertTest, ACloneIsNotConverted) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    nn::BatchNorm1d layer(3);
    dist::convert_sync_batchnorm(*layer);
    exchanges();
    const uint64_t before = exchanges();
    const auto clone = layer->clone();
    clone->as<nn::BatchNorm1d>()->forward(at::randn({4, 3}));
    EXPECT_EQ(exchanges(), before);
    dist::convert_sync_batchnorm(*clone);
    clone->as<nn::BatchNorm1d>()->forward(at::randn({4, 3}));
    EXPECT_EQ(exchanges() - before, 1u);
  });
}

TEST(ConvertTest, AStateThatIsLoadedDoesNotUndoIt) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    std::stringstream file;
    torch::serialize::OutputArchive out;
    Net()->save(out);
    out.save_to(file);
    Net net;
    dist::convert_sync_batchnorm(*net);
    torch::serialize::InputArchive in;
    in.load_from(file);
    net->load(in);
    exchanges();
    const uint64_t before = exchanges();
    dist::DistributedDataParallel<NetImpl> ddp(net);
    ddp(at::randn({4, 3, 6, 6})).sum().backward();
    EXPECT_EQ(exchanges() - before, 2u * kLayers);
  });
}

TEST(ConvertTest, AWrapperMayComeFirst) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    Net net;
    dist::DistributedDataParallel<NetImpl> ddp(net);
    dist::convert_sync_batchnorm(*net);
    exchanges();
    const uint64_t before = exchanges();
    ddp(at::randn({4, 3, 6, 6})).sum().backward();
    EXPECT_EQ(exchanges() - before, 2u * kLayers);
  });
}

TEST(ConvertTest, DestroyedLayersLeaveNothingBehind) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
    for (int i = 0; i < 100; ++i) {
      Net net;
      dist::convert_sync_batchnorm(*net);
      // Running mean and weight of each, of the one without statistics its weight.
      EXPECT_EQ(dist::detail::registered_keys(), 2u * kLayers - 1);
    }
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
    // Layers that are made now may have their addresses.
    exchanges();
    const uint64_t before = exchanges();
    for (int i = 0; i < 100; ++i) Net()->forward(at::randn({4, 3, 6, 6}));
    EXPECT_EQ(exchanges(), before);
  });
}

TEST(ConvertTest, RevertLeavesNothingBehind) {
  run_ranks(1, [](int) {
    Net net;
    dist::convert_sync_batchnorm(*net);
    dist::revert_sync_batchnorm(*net);
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
  });
}

TEST(ConvertTest, AForgottenInitProcessGroupIsAnError) {
  run_ranks(1, [](int) {
    ::setenv("WORLD_SIZE", "2", 1);
    nn::BatchNorm1d layer(3);
    dist::convert_sync_batchnorm(*layer);
    EXPECT_THAT(message_of<UserError>([&] {
                  layer(at::randn({4, 3}));
                }),
                HasSubstr("init_process_group"));
  });
}

TEST(ConvertTest, ABatchThatIsEmptyOnAllRanksChangesNoBuffer) {
  run_ranks(2, [](int) {
    dist::init_process_group();
    nn::BatchNorm2d layer(3);
    dist::convert_sync_batchnorm(*layer);
    layer(at::randn({0, 3, 2, 2}));
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 0);
    EXPECT_TRUE(layer->running_var.equal(at::ones({3})));
  });
}

/// Two replicas, as torch::nn::parallel::data_parallel makes them.
template <class Module>
void expect_replicas_are_refused(const Module& net, const std::string& name) {
  const std::vector<at::Device> devices(2, at::kCPU);
  auto replicas = nn::parallel::replicate(net, devices);
  const std::string message = message_of<UserError>([&] {
    nn::parallel::parallel_apply(replicas, std::vector<at::Tensor>(2, at::randn({4, 3})));
  });
  EXPECT_THAT(message, AllOf(HasSubstr("layer '" + name + "'"), HasSubstr("data_parallel")));
}

TEST(ConvertTest, ReplicasOfDataParallelAreRefused) {
  run_ranks(1, [](int) {
    nn::Sequential net(nn::Linear(3, 3), nn::BatchNorm1d(3));
    // What is not converted is libtorch's own affair.
    auto replicas = nn::parallel::replicate(net.ptr(), std::vector<at::Device>(2, at::kCPU));
    nn::parallel::parallel_apply(replicas, std::vector<at::Tensor>(2, at::randn({4, 3})));
    dist::convert_sync_batchnorm(*net);
    expect_replicas_are_refused(net.ptr(), "1");
    nn::Sequential own(nn::Linear(3, 3), dist::SyncBatchNorm(3));
    dist::convert_sync_batchnorm(*own);
    expect_replicas_are_refused(own.ptr(), "1");
  });
}

}  // namespace
