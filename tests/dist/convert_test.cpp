#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <cstdlib>
#include <sstream>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>

#include "batch_norm/convert.h"
#include "dist/convert_cases.h"
#include "dist/device.h"
#include "dist/tensors.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;
using syncbn::base::UserError;
using syncbn::test::close;
using syncbn::test::device;
using syncbn::test::exchanges;
using syncbn::test::expect_steps;
using syncbn::test::expect_trains_as_whole_batch;
using syncbn::test::Gradients;
using syncbn::test::kLayers;
using syncbn::test::kSteps;
using syncbn::test::message_of;
using syncbn::test::on_device;
using syncbn::test::ones;
using syncbn::test::randn;
using syncbn::test::run_on_device;
using syncbn::test::run_ranks;
using syncbn::test::Steps;
using syncbn::test::zeros;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ConvertTest = syncbn::test::DeviceTest;

/// Batch norm in a Sequential, in module holders and in a container within a container.
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

/// kLayers linear layers, each with batch norm after it. The net can be cloned.
nn::Sequential flat_net() {
  nn::Sequential net;
  for (int i = 0; i < kLayers; ++i) {
    net->push_back(nn::Linear(3, 3));
    net->push_back(nn::BatchNorm1d(3));
  }
  return on_device(net);
}

template <class Module>
void expect_net_steps(Module net, const Steps& steps = {}) {
  expect_steps([&](const at::Tensor& x) { return net->forward(x); }, net->parameters(), steps);
}

// Instance norm calls the same operator, with views of other tensors.
TEST_F(ConvertTest, TakesLayersOfVolumesAndLeavesInstanceNormAlone) {
  run_on_device(2, [](int) {
    at::manual_seed(0);
    nn::InstanceNorm3d instance(
        nn::InstanceNorm3dOptions(4).affine(true).track_running_stats(true));
    nn::Sequential net(nn::Conv3d(nn::Conv3dOptions(3, 4, 1)), instance);
    for (int i = 0; i < kLayers; ++i) net->push_back(nn::BatchNorm3d(4));
    net->to(device());
    const at::Tensor x = randn({4, 4, 3, 3, 3});
    const at::Tensor before = instance(x);
    const auto report = dist::convert_sync_batchnorm(*net);
    EXPECT_EQ(report.converted.size(), static_cast<size_t>(kLayers));
    EXPECT_TRUE(report.not_converted.empty());
    expect_net_steps(net, {.batch = {4, 3, 3, 3, 3}});
    instance->weight.set_data(ones({4}));
    instance->bias.set_data(zeros({4}));
    EXPECT_TRUE(instance(x).equal(before));
  });
}

TEST_F(ConvertTest, NamesEveryLayerAndTrainsAsOnTheWholeBatch) {
  run_on_device(2, [](int rank) {
    at::manual_seed(0);
    auto net = on_device(Net());
    at::manual_seed(0);
    auto reference = on_device(Net());
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

TEST_F(ConvertTest, NamesSyncBatchNormLayersThatKeepAnotherGroup) {
  run_on_device(2, [](int) {
    const auto group = dist::new_group({0, 1});
    const auto over = [](const dist::SyncBatchNormOptions& options) {
      return dist::SyncBatchNorm(options);
    };
    nn::Sequential net(nn::BatchNorm2d(4), over(4),
                       over(dist::SyncBatchNormOptions(4).process_group(group)),
                       over(dist::SyncBatchNormOptions(4).group_size(1)));
    EXPECT_THAT(dist::convert_sync_batchnorm(*net, group).keep_group, ElementsAre("1", "3"));
    EXPECT_THAT(dist::convert_sync_batchnorm(*net).keep_group, ElementsAre("2", "3"));
  });
}

/// Like expect_net_steps(), for a network on the CPU, whatever the tests' device.
void expect_net_steps_on_cpu(Net net, Steps steps = {}) {
  expect_steps([&](const at::Tensor& x) { return net->forward(x.cpu()); }, net->parameters(),
               steps);
}

// The tensors get new memory: on the tests' device instead of the CPU, or with another type, and
// back.
TEST_F(ConvertTest, LayersThatMoveStayConverted) {
  run_on_device(2, [](int rank) {
    at::manual_seed(0);
    Net net;
    at::manual_seed(0);
    auto reference = on_device(Net());
    dist::convert_sync_batchnorm(*net);
    net->to(device());
    expect_trains_as_whole_batch([&](const at::Tensor& x) { return net->forward(x); },
                                 net->parameters(),
                                 [&](const at::Tensor& x) { return reference->forward(x); },
                                 reference->parameters(), rank, Gradients::kLocal);
    net->to(at::kCPU, at::kDouble);
    expect_net_steps_on_cpu(net, {.dtype = at::kDouble});
    net->to(device(), at::kDouble);
    expect_net_steps(net, {.dtype = at::kDouble});
    net->to(device(), at::kFloat);
    expect_net_steps(net);
    // No key of the earlier tensors is left.
    dist::revert_sync_batchnorm(*net);
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
    expect_net_steps(net, {.exchanges = 0});
  });
}

TEST_F(ConvertTest, LayersThatRanAndMovedAreConverted) {
  run_on_device(2, [](int) {
    Net net;
    expect_net_steps_on_cpu(net, {.exchanges = 0});
    net->to(device());
    expect_net_steps(net, {.exchanges = 0});
    EXPECT_EQ(dist::convert_sync_batchnorm(*net).converted.size(), static_cast<size_t>(kLayers));
    expect_net_steps(net);
  });
}

TEST_F(ConvertTest, RevertAndEvaluationAndOtherModulesExchangeNothing) {
  run_on_device(2, [](int) {
    auto net = on_device(Net());
    auto other = on_device(Net());
    dist::convert_sync_batchnorm(*net);
    expect_net_steps(other, {.exchanges = 0});
    expect_net_steps(net);
    net->eval();
    expect_net_steps(net, {.exchanges = 0});
    net->train();
    expect_net_steps(net);
    dist::revert_sync_batchnorm(*net);
    expect_net_steps(net, {.exchanges = 0});
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
  });
}

TEST_F(ConvertTest, TheRootItselfIsConverted) {
  run_on_device(2, [](int) {
    std::vector<nn::BatchNorm1d> roots;
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < kLayers; ++i) {
      nn::BatchNorm1d& root = roots.emplace_back(on_device(nn::BatchNorm1d(3)));
      EXPECT_THAT(dist::convert_sync_batchnorm(*root).converted, ElementsAre(""));
      for (const at::Tensor& parameter : root->parameters()) parameters.push_back(parameter);
    }
    const auto forward = [&](at::Tensor x) {
      for (nn::BatchNorm1d& root : roots) x = root(x);
      return x;
    };
    expect_steps(forward, parameters, {.batch = {6, 3}});
    const at::Tensor batch = randn({6, 3});
    at::Tensor sum = batch.sum(0);
    dist::all_reduce(sum);
    roots[0]->running_mean.zero_();
    forward(batch);
    EXPECT_TRUE(close(roots[0]->running_mean, sum / 12 * 0.1));
  });
}

// Calls are otherwise intercepted in autograd, which inference mode skips.
TEST_F(ConvertTest, TrainingInInferenceModeIsSynchronisedToo) {
  run_on_device(2, [](int rank) {
    auto net = on_device(Net());
    dist::convert_sync_batchnorm(*net);
    exchanges();
    const c10::InferenceMode guard;
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t before = exchanges();
      net->forward(randn({4, 3, 6, 6}) + rank);
      EXPECT_EQ(exchanges() - before, static_cast<uint64_t>(kLayers));
    }
    at::Tensor total = net->first->running_mean.clone();
    dist::all_reduce(total);
    EXPECT_TRUE(close(net->first->running_mean * 2, total));
  });
}

TEST_F(ConvertTest, ItsKernelIsThereFromTheFirstConversionOn) {
  run_ranks(1, [](int) {
    const auto is_there = [] {
      return c10::Dispatcher::singleton()
          .findSchemaOrThrow("aten::batch_norm", "")
          .hasKernelForDispatchKey(device().is_cuda() ? c10::DispatchKey::AutogradCUDA
                                                      : c10::DispatchKey::AutogradCPU);
    };
    auto net = on_device(Net());
    net->forward(randn({4, 3, 6, 6}));
    on_device(dist::SyncBatchNorm(3))->forward(randn({4, 3}));
    EXPECT_FALSE(is_there());
    dist::convert_sync_batchnorm(*net);
    EXPECT_TRUE(is_there());
  });
}

TEST_F(ConvertTest, WorksUnderAutocast) {
  run_on_device(2, [](int) {
    auto net = on_device(Net());
    dist::convert_sync_batchnorm(*net);
    const auto forward = [&](const at::Tensor& x) {
      const at::DeviceType type = device().type();
      at::autocast::set_autocast_enabled(type, true);
      at::Tensor output = net->forward(x);
      at::autocast::set_autocast_enabled(type, false);
      at::autocast::clear_cache();
      EXPECT_EQ(output.scalar_type(), at::autocast::get_autocast_dtype(type));
      return output;
    };
    expect_steps(forward, net->parameters());
    EXPECT_EQ(net->first->running_mean.scalar_type(), at::kFloat);
  });
}

TEST_F(ConvertTest, ALayerWithoutStatisticsAndWeightIsListed) {
  run_on_device(2, [](int) {
    nn::Sequential net = flat_net();
    net->push_back(
        nn::BatchNorm1d(nn::BatchNorm1dOptions(3).affine(false).track_running_stats(false)));
    net->to(device());
    const auto report = dist::convert_sync_batchnorm(*net);
    EXPECT_EQ(report.converted.size(), static_cast<size_t>(kLayers));
    ASSERT_EQ(report.not_converted.size(), 1u);
    EXPECT_EQ(report.not_converted[0].name, "10");
    EXPECT_THAT(report.not_converted[0].reason, HasSubstr("neither running statistics nor"));
    expect_net_steps(net, {.batch = {4, 3}});
  });
}

TEST_F(ConvertTest, WhatTheLayersHaveStaysTheirs) {
  run_on_device(2, [](int) {
    auto net = on_device(Net());
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
    // All layers except the one in evaluation mode.
    expect_net_steps(net, {.exchanges = kLayers - 1});
    EXPECT_EQ(hooked, kSteps);
  });
}

TEST_F(ConvertTest, ALayerThatIsReferencedTwiceExchangesWhereverItIsCalled) {
  run_on_device(2, [](int) {
    nn::Sequential net = flat_net();
    nn::BatchNorm1d shared(3);
    net->push_back(shared);
    net->push_back(nn::Linear(3, 3));
    net->push_back(shared);
    net->to(device());
    EXPECT_THAT(dist::convert_sync_batchnorm(*net).converted,
                ElementsAre("1", "3", "5", "7", "9", "10"));
    expect_net_steps(net, {.exchanges = kLayers + 2, .batch = {4, 3}});
  });
}

TEST_F(ConvertTest, ACloneIsNotConverted) {
  run_on_device(2, [](int) {
    nn::Sequential net = flat_net();
    dist::convert_sync_batchnorm(*net);
    nn::Sequential clone(std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone()));
    expect_net_steps(clone, {.exchanges = 0, .batch = {4, 3}});
    dist::convert_sync_batchnorm(*clone);
    expect_net_steps(clone, {.batch = {4, 3}});
  });
}

TEST_F(ConvertTest, AStateThatIsLoadedDoesNotUndoIt) {
  run_on_device(2, [](int) {
    std::stringstream file;
    torch::serialize::OutputArchive out;
    Net()->save(out);
    out.save_to(file);
    auto net = on_device(Net());
    dist::convert_sync_batchnorm(*net);
    torch::serialize::InputArchive in;
    in.load_from(file, device());
    net->load(in);
    dist::DistributedDataParallel<NetImpl> ddp(net);
    expect_steps([&](const at::Tensor& x) { return ddp(x); }, net->parameters());
  });
}

TEST_F(ConvertTest, AWrapperMayComeFirst) {
  run_on_device(2, [](int) {
    auto net = on_device(Net());
    dist::DistributedDataParallel<NetImpl> ddp(net);
    expect_steps([&](const at::Tensor& x) { return ddp(x); }, net->parameters(), {.exchanges = 0});
    dist::convert_sync_batchnorm(*net);
    expect_steps([&](const at::Tensor& x) { return ddp(x); }, net->parameters());
  });
}

TEST_F(ConvertTest, DestroyedLayersLeaveNothingBehind) {
  run_on_device(2, [](int) {
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
    for (int i = 0; i < 100; ++i) {
      auto net = on_device(Net());
      dist::convert_sync_batchnorm(*net);
      // The running mean and the weight of each layer; only the weight of the one without
      // statistics.
      EXPECT_EQ(dist::detail::registered_keys(), 2u * kLayers - 1);
    }
    EXPECT_EQ(dist::detail::registered_keys(), 0u);
    // New layers may have the addresses of destroyed ones.
    for (int i = 0; i < 20; ++i) expect_net_steps(on_device(Net()), {.exchanges = 0});
  });
}

TEST_F(ConvertTest, AForgottenInitProcessGroupIsAnError) {
  run_ranks(1, [](int) {
    ::setenv("WORLD_SIZE", "2", 1);
    nn::Sequential net = flat_net();
    dist::convert_sync_batchnorm(*net);
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_THAT(message_of<UserError>([&] {
                    net->forward(randn({4, 3}));
                  }),
                  HasSubstr("init_process_group"));
    }
  });
}

TEST_F(ConvertTest, ABatchThatIsEmptyOnAllRanksChangesNoBuffer) {
  run_on_device(2, [](int) {
    auto net = on_device(Net());
    dist::convert_sync_batchnorm(*net);
    std::vector<at::Tensor> before;
    for (const at::Tensor& buffer : net->buffers()) before.push_back(buffer.clone());
    expect_net_steps(net, {.batch = {0, 3, 6, 6}});
    const auto after = net->buffers();
    for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
  });
}

}  // namespace
